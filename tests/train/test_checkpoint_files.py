"""Checkpoints on disk: whole or refused, numbered, pruned, and free of pickles."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import farandole
from farandole.errors import CheckpointError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint, manifest


def save_some(folder: Path, size: int = 2, saves: int = 1, **options: Any) -> list[Path]:
    """Checkpoints of a small run of `size` ranks; their paths."""

    def body(run: Run) -> list[Path]:
        model = nn.Linear(3, 2)
        wrapped, optimizer = run.distribute(model, torch.optim.Adam(model.parameters()))
        wrapped(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return [run.save(folder, **options) for _ in range(saves)]

    return run_world(size, body, folder=folder.parent / "runs")[0]


def load(path: Path, size: int = 2) -> Any:
    def body(run: Run) -> Any:
        model = nn.Linear(3, 2)
        run.distribute(model, torch.optim.Adam(model.parameters()))
        return run.load(path)

    return run_world(size, body, folder=path.parent / "runs")[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two good checkpoints of a run of two ranks."""
    folder = tmp_path_factory.mktemp("two") / "checkpoints"
    save_some(folder, saves=2, note="kept")
    return folder


@pytest.fixture
def spare(two: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(two, tmp_path / "checkpoints"))


def test_only_safetensors_and_json(two: Path) -> None:
    names = sorted(path.name for path in (two / "000001").iterdir())
    assert names == [
        "manifest.json",
        "model-0.safetensors",
        "optimizer-0.safetensors",
        "rank-0.safetensors",
        "rank-1.safetensors",
    ]
    wrapper = json.loads((two / "000001/manifest.json").read_text())
    manifest = json.loads(wrapper["body"])
    assert sorted(manifest["files"]) == names[1:]
    with safe_open(two / "000001/model-0.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["bias", "weight"]  # other tools can read the model


def test_nothing_is_ever_unpickled(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint was unpickled")

    for module, name in [(pickle, "load"), (pickle, "loads"), (torch, "load")]:
        monkeypatch.setattr(module, name, refused)
    assert load(two) == {"note": "kept"}


def test_no_module_of_ours_imports_pickle() -> None:
    package = Path(farandole.__file__).parent
    pattern = re.compile(
        r"^\s*(import|from)\s+(pickle|dill|cloudpickle|shelve|joblib)|torch\.load\("
    )
    guilty = [
        str(path)
        for path in package.rglob("*.py")
        if any(pattern.search(line) for line in path.read_text().splitlines())
    ]
    assert guilty == []


def files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.iterdir() if path.is_file())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_refused(two: Path, data: st.DataObject) -> None:
    """In any file, at any place, any bit; the last good one is named."""
    file = data.draw(st.sampled_from(list(files(two / "000001"))))
    whole = file.read_bytes()
    offset = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[offset] ^= 1 << data.draw(st.integers(0, 7))
    try:
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"000001 is refused: .*000000"):
            checkpoint.read(two / "000001")
        assert checkpoint.newest_good(two) == two / "000000"
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "part",
    ["manifest.json", "model-0.safetensors", "optimizer-0.safetensors", "rank-1.safetensors"],
)
@pytest.mark.parametrize("damage", ["cut", "emptied", "lost", "longer"])
def test_a_damaged_file_is_refused_on_every_rank(spare: Path, part: str, damage: str) -> None:
    file = spare / "000001" / part
    whole = file.read_bytes()
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes({"cut": whole[:-1], "emptied": b"", "longer": whole + b"\0"}[damage])

    def body(run: Run) -> str:
        model = nn.Linear(3, 2)
        before = model.weight.detach().clone()
        run.distribute(model, torch.optim.Adam(model.parameters()))
        with pytest.raises(CheckpointError) as caught:
            run.load(spare)
        run.group.barrier()
        if run.rank == 0:
            assert torch.equal(model.weight, before)  # nothing was half-loaded
        return str(caught.value)

    for message in run_world(2, body, folder=spare.parent):
        assert f"checkpoint {spare / '000001'} is refused" in message
        assert f"The last good one is {spare / '000000'}" in message
    assert load(spare / "000000") == {"note": "kept"}


@pytest.mark.parametrize(
    "text",
    [
        "", "null", "[]", "5", "{}", '"x"', "{" * 20, "\xff",
        '{"sha256": 1, "body": 2}', '{"sha256": "", "body": ""}',
    ],
)  # fmt: skip
def test_a_manifest_of_another_kind_is_refused(spare: Path, text: str) -> None:
    (spare / "000001/manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"000001 is refused.*last good one is .*000000"):
        checkpoint.read(spare / "000001")


def test_a_manifest_of_a_later_format_is_refused(
    spare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 99)
    with pytest.raises(CheckpointError, match="format 1 is not the known format 99"):
        checkpoint.read(spare / "000001")


def test_given_the_path_of_a_damaged_one_the_last_good_one_is_named(spare: Path) -> None:
    (spare / "000001/manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"000001 is refused.*last good one is .*000000"):
        load(spare / "000001")
    shutil.rmtree(spare / "000000")
    with pytest.raises(CheckpointError, match="There is no other one beside it"):
        load(spare)


def test_the_newest_is_found_by_number_and_strangers_are_passed_over(spare: Path) -> None:
    (spare / "000001").rename(spare / "999999")
    (spare / "latest").mkdir()
    (spare / "²").mkdir()  # a digit to Unicode, not a number to us
    (spare / "000007.txt").write_text("")
    (spare / "1000001").write_text("a file, not a checkpoint")
    (spare / ".1000000.tmp").mkdir()
    (spare / ".1000000.tmp/rest").write_text("left by a crash")
    assert checkpoint.newest(spare) == spare / "999999"
    with pytest.warns(UserWarning, match="of an earlier run"):
        (made,) = save_some(spare)
    assert made == spare / "1000000"
    assert checkpoint.newest(spare) == made
    assert not (spare / ".1000000.tmp").exists()
    assert checkpoint.newest_good(spare) == made


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_stay(tmp_path: Path, keep: int) -> None:
    made = save_some(tmp_path / "c", size=1, saves=4, keep=keep)
    assert [path.name for path in made] == ["000000", "000001", "000002", "000003"]
    left = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert left == [path.name for path in made[-keep:]]
    assert all(checkpoint.read(tmp_path / "c" / name) for name in left)


def test_three_are_kept_unless_said_otherwise(tmp_path: Path) -> None:
    save_some(tmp_path / "c", size=1, saves=5)
    assert len(list((tmp_path / "c").iterdir())) == 3


def test_state_that_cannot_be_held_fails_everywhere_and_leaves_nothing(tmp_path: Path) -> None:
    def body(run: Run) -> str:
        run.save(best=1.0)
        with pytest.raises(CheckpointError) as caught:
            run.save(best={"seen": {1, 2}})
        run.group.barrier()
        return str(caught.value)

    for message in run_world(3, body, folder=tmp_path):
        assert "best.seen is a set" in message
        assert "space" not in message  # the disk is not to blame
    checkpoints = tmp_path / "world/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["000000"]


def test_an_unwritable_place_fails_everywhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def body(run: Run) -> str:
        with pytest.raises(CheckpointError) as caught:
            run.save(tmp_path / "file/checkpoints")
        run.group.barrier()
        return str(caught.value)

    for message in run_world(2, body, folder=tmp_path):
        assert "could not save to" in message
        assert "file/checkpoints" in message
        assert "pass another path" in message
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_rank_that_cannot_write_spoils_it_for_all_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checkpoint.write_parts

    def fails_on_rank_1(temporary: Path, parts: dict[str, Any]) -> Any:
        if "rank-1" in parts:
            raise OSError(28, "No space left on device")
        return honest(temporary, parts)

    def body(run: Run) -> str:
        run.save(best=1.0)
        run.group.barrier()
        if run.rank == 0:
            monkeypatch.setattr(checkpoint, "write_parts", fails_on_rank_1)
        run.group.barrier()
        with pytest.raises(CheckpointError) as caught:
            run.save(best=2.0)
        run.group.barrier()
        return str(caught.value)

    messages = run_world(2, body, folder=tmp_path)
    for message in messages:
        assert "rank 1: [Errno 28] No space left on device" in message
    assert "The last good checkpoint is" in messages[0]
    checkpoints = tmp_path / "world/checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["000000"]


def test_user_state_of_every_kind_comes_back(tmp_path: Path) -> None:
    state = {
        "tensor": torch.tensor([1.5, float("inf")], dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "number": float("-inf"),
        "nested": {"a": [1, (2, 3), {4: None}], "a.b": True},
        "text": "naïve ☃",
    }

    def body(run: Run) -> Any:
        run.save(**state)
        return run.load()

    for got in run_world(2, body, folder=tmp_path):
        assert got.keys() == state.keys()
        for name in ("tensor", "scalar", "empty"):
            assert got[name].dtype == state[name].dtype
            assert torch.equal(got[name], state[name])
        assert all(got[name] == state[name] for name in ("number", "nested", "text"))


def test_a_path_may_be_text_and_is_made(tmp_path: Path) -> None:
    def body(run: Run) -> Path:
        return run.save(str(tmp_path / "deep/er"), best=3)

    made = run_world(1, body, folder=tmp_path)[0]
    assert made == tmp_path / "deep/er/000000"
    assert checkpoint.read(made)["state"] == {"best": 3}
