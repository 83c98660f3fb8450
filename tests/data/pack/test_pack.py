"""A folder becomes shards that hold every file once, and packing can be interrupted."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import farandole as fd
from farandole.cli import commands
from farandole.data.pack import write
from farandole.data.pack.plan import make_plan
from farandole.data.pack.write import write_shards
from farandole.errors import DataError, FarandoleError, UserError


def images(folder: Path) -> Path:
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            (folder / name / f"{number}.JPG").write_bytes(name.encode() + bytes([number]) * 700)
            (folder / name / f"{number}.json").write_text(json.dumps({"n": number}))
    (folder / "cats/.hidden").write_text("")
    (folder / ".git").mkdir()
    (folder / ".git/objects").write_text("")
    return folder


def pack(*arguments: object) -> Result:
    return CliRunner().invoke(commands, ["pack", *map(str, arguments)])


def test_folders_of_classes_become_shards_that_can_be_read(tmp_path: Path) -> None:
    done = pack(images(tmp_path / "images"), tmp_path / "shards", "--samples", 4)
    assert done.exit_code == 0, done.output
    assert "2 classes: cats, dogs" in done.output
    assert "1 hidden file(s) were left out" in done.output
    assert "10 samples in 3 shards" in done.output
    line = done.output.splitlines()[-1]
    assert line == f'fd.data.shards("{tmp_path}/shards/{{000..002}}.tar")'
    found = fd.data.shards(line.split('"')[1])
    samples = {sample["__key__"]: sample for sample in (found[i] for i in range(len(found)))}
    assert len(samples) == 10
    for label, name in enumerate(("cats", "dogs")):
        for number in range(5):
            sample = samples[f"{name}/{number}"]
            assert sample["jpg"] == name.encode() + bytes([number]) * 700
            assert (sample["cls"], sample["json"]) == (label, {"n": number})
    assert [found[i]["cls"] for i in range(10)] != [0] * 5 + [1] * 5  # mixed


def test_packing_goes_on_and_the_same_files_make_the_same_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(images(tmp_path / "images"), shard_bytes=5000, shard_samples=None, seed=1)
    assert len(plan.shards) > 2
    whole, target = tmp_path / "whole", tmp_path / "target"
    write_shards(plan, whole)

    def stop(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(plan, target, stop)
    assert json.loads((target / "pack.json").read_text())["complete"] is False
    assert write_shards(plan, target) == 1
    for path in whole.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
        assert path.name == "pack.json" or path.stat().st_size < 5000 + 10_240 + 3 * 512
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in whole.iterdir())

    def full(tar: object, sample: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_add", full)
    with pytest.raises(FarandoleError, match=r"000.tar: No space left.*run the same command again"):
        write_shards(plan, tmp_path / "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["pack.json"]


def test_what_cannot_be_packed_is_refused_by_name(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    target = tmp_path / "shards"
    for arguments, message in (
        ((tmp_path / "no", target), "no is no folder"),
        ((folder, target, "--size", "1MiB", "--samples", 3), "give one of them"),
        ((folder, target, "--samples", 0), "at least one"),
        ((folder, folder / "shards"), "is within"),
        ((folder, tmp_path), "is not empty: it has images"),
    ):
        found = pack(*arguments)
        assert isinstance(found.exception, UserError)
        assert message in str(found.exception)
    assert pack(folder, target).exit_code == 0
    again = pack(folder, target, "--samples", 3)
    assert "has shards of other files, or of other sizes" in str(again.exception)
    (folder / "cats/0.jpg").write_bytes(b"another")
    with pytest.raises(UserError, match=r"cats/0.jpg would both be|cats/0.JPG would both be"):
        make_plan(folder, shard_bytes=1, shard_samples=None, seed=None)
    (folder / "cats/0.jpg").unlink()
    plan = make_plan(folder, shard_bytes=1, shard_samples=None, seed=None)
    (folder / "cats/0.JPG").write_bytes(b"shorter")
    with pytest.raises(DataError, match=r"0.JPG had 704 bytes when packing began, and has 7 now"):
        write_shards(plan, tmp_path / "changed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no files"):
        make_plan(tmp_path / "empty", shard_bytes=1, shard_samples=None, seed=None)


names = st.text("ab.1", min_size=1, max_size=4).filter(lambda name: name.strip("."))


@settings(max_examples=40, deadline=None)
@given(files=st.sets(names, min_size=1, max_size=8), size=st.integers(1, 9000))
def test_any_names_are_there_once(
    tmp_path_factory: pytest.TempPathFactory, files: set[str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "in").mkdir()
    for name in files:
        (folder / "in" / name).write_text(name)
    visible = sorted(name for name in files if not name.startswith("."))
    with contextlib.suppress(UserError):
        plan = make_plan(folder / "in", shard_bytes=size, shard_samples=None, seed=3)
    inside = [name.rpartition(".") if "." in name else (name, ".", "bin") for name in visible]
    if not visible or len({(base.replace(".", "_"), field) for base, _, field in inside}) < len(
        visible
    ):
        return  # two files would be one, or there is none: refused
    write_shards(plan, folder / "out")
    dataset = fd.data.shards(plan.pattern(folder / "out"))
    found = [dataset[index] for index in range(len(dataset))]
    contents = sorted(
        value if isinstance(value, str) else value.decode()
        for sample in found
        for field, value in sample.items()
        if field != "__key__"
    )
    assert contents == visible
