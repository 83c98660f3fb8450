"""Checkpoints in object stores: whole or not at all, resumed from, and one run at a time."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import farandole as fd
from farandole.errors import CheckpointError, UserError
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run
from farandole.train.checkpoint.remote.store import ObjectStore

DATA = [(torch.tensor([float(index)]), index) for index in range(24)]


class FailingFileSystem(MemoryFileSystem):
    """Memory, of which some writes fail in the middle, or arrive cut short without a word."""

    protocol = "failing"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    breaks: str | None = None  # writes of paths that contain this
    cuts: str | None = None
    times = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:  # type: ignore[override]
        file = super()._open(path, mode, **options)
        cls = type(self)
        if "w" in mode and cls.times:
            if cls.breaks is not None and cls.breaks in path:
                cls.times -= 1
                file.write(b"half of it")
                file.close()
                raise ConnectionError("the store does not answer")
            if cls.cuts is not None and cls.cuts in path:
                cls.times -= 1
                write = file.write
                file.write = lambda data: write(data[:3]) and len(data)
        return file


fsspec.register_implementation("failing", FailingFileSystem, clobber=True)


@pytest.fixture(params=["memory", "file", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        place = f"memory://{uuid.uuid4().hex}/digits"
    else:
        place = f"{request.param}://{tmp_path / 'bucket/digits'}"
    return place


@pytest.fixture
def failing() -> Iterator[str]:
    yield f"failing://{uuid.uuid4().hex}/digits"
    FailingFileSystem.breaks = FailingFileSystem.cuts = None
    FailingFileSystem.times = 0


def prepared(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.5)
    run.distribute(model, optimizer)
    return model, optimizer


def train(run: Run, epochs: int) -> Iterator[tuple[int, list[int]]]:
    model, optimizer = prepared(run)
    for epoch in run.epochs(epochs):
        for x, indices in run.loader(DATA, batch_size=2):  # type: ignore[arg-type]
            optimizer.zero_grad()
            (-model(x * 0).mean()).backward()
            optimizer.step()
            yield epoch, indices.tolist()


def numbers(url: str) -> list[int]:
    return [name.number for name in ObjectStore(url).whole_names()]


def drafts(url: str) -> list[str]:
    store = ObjectStore(url)
    return [name.text for name in store.names() if not store.is_whole(name.text)]


def test_saved_and_resumed_mid_epoch_on_another_number_of_workers(tmp_path: Path, url: str) -> None:
    policy = fd.Checkpoints(every="2steps", keep=2, to=url)

    def dies(run: Run) -> list[tuple[int, list[int]]]:
        seen = []
        for _ in train(run, epochs=2):
            seen.append(_)
            if run.steps == 9:
                run.wait_for_save()
                return seen[:8]
        raise AssertionError

    def goes_on(run: Run) -> list[tuple[int, list[int]]]:
        return list(train(run, epochs=2))

    seen = run_world(2, dies, folder=tmp_path / "one", checkpoints=policy)
    assert numbers(url) == [2, 3]
    assert not (tmp_path / "one/world/checkpoints").exists()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*start.? afresh")
        # Another folder of runs, as on another host: all there is comes from the store.
        seen += run_world(3, goes_on, folder=tmp_path / "two", checkpoints=policy)
    used = sorted((epoch, index) for rank in seen for epoch, batch in rank for index in batch)
    assert used == sorted((epoch, index) for epoch in range(2) for index in range(24))
    assert len(numbers(url)) == 2
    assert not drafts(url)
    assert not list((tmp_path / "two/world").glob(".fetched*"))


def test_a_script_saves_and_loads_there_by_its_url(tmp_path: Path, url: str) -> None:
    def body(run: Run) -> tuple[Any, ...]:
        model, _ = prepared(run)
        with torch.no_grad():
            model.bias.fill_(7.0)
        saved = [run.save(url, best=number) for number in range(3)]
        with torch.no_grad():
            model.bias.fill_(0.0)
        newest = run.load(url)
        assert model.bias.item() == 7.0
        first = run.load(saved[0])
        return (newest, first, *saved)

    newest, first, *saved = run_world(2, body, folder=tmp_path)[0]
    assert newest == {"best": 2}
    assert first == {"best": 0}
    assert saved[0].startswith(f"{url}/000000-")
    names = sorted(ObjectStore(url).sizes(saved[0].rpartition("/")[2]))
    assert [name for name in names if not name.startswith("rank-")] == [
        "manifest.json",
        "model-0.safetensors",
    ]

    def nothing(run: Run) -> None:
        prepared(run)
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            run.load(f"{url}/elsewhere")

    run_world(1, nothing, folder=tmp_path)


@pytest.mark.parametrize("url", ["file", "local"], indirect=True)
def test_on_two_hosts_each_fetches_once(tmp_path: Path, url: str) -> None:
    """Not in memory: a file there has one position for all its readers, here two threads."""

    def save(run: Run) -> None:
        prepared(run)
        run.save(url, number=5)

    def load(run: Run) -> Any:
        prepared(run)
        return run.load(url)

    where = Topology.declared([2, 1])
    run_world(3, save, folder=tmp_path, topology=where)
    assert run_world(3, load, folder=tmp_path, topology=where) == [{"number": 5}] * 3
    assert not list((tmp_path / "world").glob(".fetched*"))


@pytest.mark.parametrize("part", ["model-0", "rank-1", "manifest.json", "entry-1"])
def test_an_upload_that_breaks_leaves_no_checkpoint(
    tmp_path: Path, failing: str, part: str
) -> None:
    def body(run: Run) -> str:
        prepared(run)
        run.save(failing, number=0)
        run.group.barrier()
        if run.rank == 0:
            FailingFileSystem.breaks = part
            FailingFileSystem.times = 1
        run.group.barrier()
        with pytest.raises(CheckpointError) as caught:
            run.save(failing, number=1)
        assert run.load(failing) == {"number": 0}
        run.save(failing, number=2)
        assert run.load(failing) == {"number": 2}
        return str(caught.value)

    said = run_world(2, body, folder=tmp_path)[0]
    assert "the store does not answer" in said
    assert "The last good checkpoint is failing://" in said
    assert len(numbers(failing)) == 2
    assert not drafts(failing)


def test_an_upload_that_is_cut_short_is_noticed(tmp_path: Path, failing: str) -> None:
    def body(run: Run) -> None:
        prepared(run)
        FailingFileSystem.cuts, FailingFileSystem.times = "model-0", 1
        with pytest.raises(CheckpointError, match=r"model-0.safetensors has \d+ bytes instead of"):
            run.save(failing)

    run_world(1, body, folder=tmp_path)
    assert numbers(failing) == []


def test_a_store_that_fails_for_a_while_costs_a_checkpoint(
    tmp_path: Path, failing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body(run: Run) -> int:
        count = 0
        for _ in train(run, epochs=1):
            count += 1
            if run.steps == 4:
                FailingFileSystem.breaks, FailingFileSystem.times = "model-0", 1
        return count

    policy = fd.Checkpoints(every="3steps", keep=9, to=failing)
    assert run_world(1, body, folder=tmp_path, checkpoints=policy) == [12]
    assert "Training goes on" in capsys.readouterr().out
    assert len(numbers(failing)) == 3  # at 3, 9 and 12


def test_a_damaged_object_is_refused_and_the_one_before_it_named(tmp_path: Path, url: str) -> None:
    def save(run: Run) -> list[Any]:
        prepared(run)
        return [run.save(url, number=number) for number in range(2)]

    (saved,) = run_world(1, save, folder=tmp_path)
    files, root = fsspec.url_to_fs(saved[1])
    content = bytearray(files.cat_file(f"{root}/model-0.safetensors"))
    content[-1] ^= 1
    files.pipe_file(f"{root}/model-0.safetensors", bytes(content))

    def load(run: Run) -> Any:
        prepared(run)
        with pytest.raises(CheckpointError) as caught:
            run.load(url)
        return str(caught.value)

    (said,) = run_world(1, load, folder=tmp_path)
    assert f"checkpoint {saved[1]} is refused" in said
    assert "does not match its checksum" in said
    assert f"The one before it is {saved[0]}" in said
    assert "--fallback" in said


def test_a_second_run_in_the_same_place_is_refused_by_name(tmp_path: Path, url: str) -> None:
    policy = fd.Checkpoints(every="1h", to=url)

    def second(run: Run) -> str:
        prepared(run)
        assert run.load() == {"number": 0}
        run_world(1, another_save, folder=tmp_path / "first", checkpoints=policy)
        with pytest.raises(CheckpointError) as caught:
            run.save(number=2)
        return str(caught.value)

    def another_save(run: Run) -> None:
        prepared(run)
        run.save(number=0)

    run_world(1, another_save, folder=tmp_path / "first", checkpoints=policy)
    (said,) = run_world(1, second, folder=tmp_path / "second", checkpoints=policy)
    assert f"another run saves into {url}" in said
    assert "000001-" in said
    assert numbers(url) == [0, 1]


def test_half_written_ones_go_with_the_next_save(tmp_path: Path, url: str) -> None:
    dead = ObjectStore(url)
    dead.write(dead.new_name(0).text, "model-0.safetensors", [b"half of it"])
    assert len(drafts(url)) == 1

    def body(run: Run) -> Any:
        prepared(run)
        assert run.load() is None  # what has no manifest is no checkpoint
        return run.save(number=1)

    policy = fd.Checkpoints(every="1h", to=url)
    (saved,) = run_world(1, body, folder=tmp_path, checkpoints=policy)
    assert saved.startswith(f"{url}/000001-")
    assert not drafts(url)


def test_the_best_stays_there_too(tmp_path: Path, url: str) -> None:
    losses = [0.5, 0.1, 0.4, 0.3]

    def body(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs(len(losses)):
            for x, _ in run.loader(DATA, batch_size=12):  # type: ignore[arg-type]
                model(x * 0).mean().backward()
                optimizer.step()
            run.log(loss=losses[epoch])

    policy = fd.Checkpoints(every="2steps", keep=1, best="loss", to=url)
    run_world(1, body, folder=tmp_path, checkpoints=policy)
    store = ObjectStore(url)
    kept = [store.manifest(name.text).metrics for name in store.whole_names()]
    assert kept == [{"loss": 0.1}, {"loss": 0.3}]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nosuch://bucket/path", "is no URL of an object store"),
        ("gdrive://bucket/path", "the package for gdrive:// is not installed"),
    ],
)
def test_a_store_that_cannot_be_reached_is_refused_by_name(
    tmp_path: Path, place: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        run_world(1, prepared, folder=tmp_path, checkpoints=fd.Checkpoints(to=place))


def test_without_fsspec_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(UserError, match=r"pip install 'farandole\[objects\]'"):
        ObjectStore("memory://bucket")
