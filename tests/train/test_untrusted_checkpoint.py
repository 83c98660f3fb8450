"""A checkpoint that somebody has altered and sealed again: refused with a reason, before anything
is changed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from farandole.errors import CheckpointError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint


def seal(body: str) -> str:
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body})


def content(folder: Path) -> Any:
    return json.loads(json.loads((folder / "manifest.json").read_text())["body"])


def write(folder: Path, manifest: Any) -> None:
    (folder / "manifest.json").write_text(seal(json.dumps(manifest)))


def seal_file(folder: Path, manifest: Any, name: str) -> None:
    data = (folder / name).read_bytes()
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


class Trial:
    """A run of one rank that loads again and again, and knows whether anything has changed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        run.distribute(self.model, self.optimizer)
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def everything(self) -> str:
        state = self.optimizer.state_dict()
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        tensors += [value for each in state["state"].values() for value in each.values()]
        run = self.run
        counters = (run.samples, run.steps, run.epoch, run.resumed, random.getstate())
        shown = [value.tolist() if isinstance(value, Tensor) else value for value in tensors]
        return repr((shown, state["param_groups"], counters))

    def refuses(self, folder: Path) -> str:
        """Why. Nothing has changed then."""
        before = self.everything()
        with pytest.raises(CheckpointError) as caught:
            self.run.load(folder)
        assert self.everything() == before
        return str(caught.value)


def trial(tmp_path: Path, body: Callable[[Trial], None]) -> None:
    run_world(1, lambda run: body(Trial(run)), folder=tmp_path / "runs")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "checkpoints"

    def body(run: Run) -> None:
        of = Trial(run)
        for _ in run.epochs(1):
            for _ in run.loader([0.0] * 4, 2):
                pass
        of.run.save(folder, best=0.5, history=[1, (2, 3)])
        of.run.save(folder, best=0.6, history=[1, (2, 3)])

    run_world(1, body, folder=folder.parent / "runs")
    return folder


@pytest.fixture
def spare(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def outside(folder: Path, to: str) -> None:
    """A part whose name leads to a file elsewhere, with the right checksum."""
    manifest = content(folder)
    target = (folder / f"{to}.safetensors").resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "model-0.safetensors", target)
    manifest["files"][f"{to}.safetensors"] = manifest["files"].pop("model-0.safetensors")
    manifest["trees"][to] = manifest["trees"].pop("model-0")
    write(folder, manifest)


@pytest.mark.parametrize("name", ["../model-1", "/tmp/farandole-elsewhere/model-1", "model-0/x"])
def test_names_stay_inside(spare: Path, tmp_path: Path, name: str) -> None:
    place = spare / "000001"
    if name.startswith("/"):
        name = str(tmp_path / "elsewhere/model-1")
    outside(place, name)

    def body(of: Trial) -> None:
        reason = of.refuses(spare)
        assert "is no name of a part" in reason
        assert f"The last good one is {spare / '000000'}" in reason

    trial(tmp_path, body)


@pytest.mark.parametrize("name", ["model-0.safetensors", "manifest.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_regular_files(spare: Path, tmp_path: Path, name: str, kind: str) -> None:
    file = spare / "000001" / name
    shutil.move(file, tmp_path / name)
    if kind == "link":
        file.symlink_to(tmp_path / name)
    else:
        os.mkfifo(file)

    def body(of: Trial) -> None:
        told = {"link": "is a symbolic link", "pipe": "is no regular file"}[kind]
        assert f"{name} {told}" in of.refuses(spare)

    trial(tmp_path, body)


def wrong(manifest: Any, *path: Any, value: Any) -> Any:
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return manifest


def deep(levels: int, leaf: Any = 1) -> Any:
    for _ in range(levels):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("format",), [], "format"),
        (("files",), 5, "no files"),
        (("trees",), [], "no trees"),
        (("files", "model-0.safetensors"), 7, "size of model-0"),
        (("files", "model-0.safetensors", "bytes"), 10**30, "instead of"),
        (("files", "model-0.safetensors", "bytes"), True, "no number of bytes"),
        (("files", "other.safetensors"), {"bytes": 1, "sha256": "0" * 64}, "file of no part"),
        (("not_finite",), {"a": 1}, "not_finite"),
        (("trees", "run"), None, "part 'run' is none"),
        (("trees", "run", "steps"), "many", "steps is 'many'"),
        (("trees", "run", "seconds"), -1, "seconds is '-1'"),
        (("trees", "run", "loaders"), [{}], "loaders"),
        (("trees", "run", "sync"), 3, "sync is '3'"),
        (("trees", "state"), [], "part 'state'"),
        (("trees", "state", "best"), deep(300), "nested more than 200"),
        (("trees", "state", "best"), {"$float": "x"}, "could not convert"),
        (("trees", "state", "best"), {"$tensor": "none"}, "KeyError"),
        (("trees", "state", "best"), {"$items": [[[], 1]]}, "unhashable"),
        (("trees", "state", "best"), {"$tuple": 5}, "'\\$tuple' has no int"),
        (("trees", "state", "best"), {"$exec": "1"}, "means nothing"),
        (("trees", "model-0"), [1], "part 'model-0'"),
        (("trees", "model-0", "weight"), 5, "'weight' is int"),
        (("trees", "model-0", "extra"), 5, "extra"),
        (("trees", "model-7"), {}, "not numbered from 0"),
        (("trees", "optimizer-0", "groups"), [], "is trained now"),
        (("trees", "optimizer-0", "groups"), {}, "part 'optimizer-0'"),
        (("trees", "optimizer-0", "groups", 0, "lr"), "fast", "lr of its optimizer is 'fast'"),
        (("trees", "optimizer-0", "groups", 0, "betas"), [1], "betas"),
        (("trees", "optimizer-0", "named", "weight"), 3, "state of a parameter"),
        (("trees", "optimizer-0", "named", "weight"), {"other": 1.0}, "of one parameter and"),
        (("trees", "optimizer-0", "named", "weight", "step"), "x", "step of its optimizer is 'x'"),
        (("trees", "optimizer-0", "named", "weight", "exp_avg"), 3, "exp_avg of its optimizer"),
        (("trees", "optimizer-0", "kind"), 3, "part 'optimizer-0'"),
        (("trees", "rank-0"), 5, "part 'rank-0'"),
        (("trees", "rank-0", "sync"), [], "another number of models"),
        (("trees", "rank-0", "random", "python"), 5, "does not fit"),
        (("trees", "rank-0", "random", "numpy"), [], "does not fit"),
        (("trees", "rank-0", "random", "torch"), "x", "does not fit"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_changed(
    spare: Path, tmp_path: Path, path: tuple[Any, ...], value: Any, reason: str
) -> None:
    place = spare / "000001"
    write(place, wrong(content(place), *path, value=value))

    def body(of: Trial) -> None:
        with pytest.raises(AssertionError, match=reason):  # shows the whole message if it is not
            raise AssertionError(of.refuses(spare))

    trial(tmp_path, body)


@pytest.mark.parametrize("levels", [990, 100_000])
def test_depth_has_a_limit(spare: Path, levels: int) -> None:
    body = '{"format": 1, "files": {}, "trees": {"state": ' + "[" * levels + "]" * levels + "}}"
    for text in (seal(body), "[" * levels, '{"a":' * levels):
        (spare / "000001/manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"is refused: .*last good one is .*000000"):
            checkpoint.read(spare / "000001")


def test_tensors_of_another_shape_or_kind(spare: Path, tmp_path: Path) -> None:
    place = spare / "000001"
    whole = load_file(place / "model-0.safetensors")
    moments = load_file(place / "optimizer-0.safetensors")

    def body(of: Trial) -> None:
        for weight, said in [
            (torch.ones(3, 2), r"size mismatch for weight"),
            (torch.ones(2, 3, dtype=torch.int64), "'weight' is torch.int64"),
            (torch.ones(2, 3, dtype=torch.complex64), "'weight' is torch.complex64"),
        ]:
            manifest = content(place)
            save_file({**whole, "weight": weight}, place / "model-0.safetensors")
            seal_file(place, manifest, "model-0.safetensors")
            write(place, manifest)
            assert said in of.refuses(spare)
        manifest = content(place)
        save_file(whole, place / "model-0.safetensors")
        seal_file(place, manifest, "model-0.safetensors")
        name = next(name for name in moments if name.endswith("weight.exp_avg"))
        save_file({**moments, name: torch.ones(5)}, place / "optimizer-0.safetensors")
        seal_file(place, manifest, "optimizer-0.safetensors")
        write(place, manifest)
        assert "exp_avg of its optimizer is (5,) for a parameter of (2, 3)" in of.refuses(spare)
        save_file(moments, place / "optimizer-0.safetensors")
        seal_file(place, manifest, "optimizer-0.safetensors")
        write(place, manifest)
        assert of.run.load(spare)["best"] == 0.6  # all put right again

    trial(tmp_path, body)


def test_a_rank_whose_part_is_wrong_keeps_all_from_changing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run_world(2, lambda run: (Trial(run), run.save(folder)), folder=tmp_path / "runs")
    place = folder / "000000"
    write(place, wrong(content(place), "trees", "rank-1", "random", "python", value=[]))

    def body(run: Run) -> str:
        of = Trial(run)
        run.group.barrier()
        before = [of.model.weight.tolist(), of.optimizer.state_dict()["param_groups"], run.steps]
        with pytest.raises(CheckpointError) as caught:
            run.load(folder)
        after = [of.model.weight.tolist(), of.optimizer.state_dict()["param_groups"], run.steps]
        assert before == after
        return str(caught.value)

    told = run_world(2, body, folder=tmp_path / "runs")
    assert len(set(told)) == 1
    assert "does not fit" in told[0]


# Without shrinking: an example that fails is written down as it is.
UNHURRIED = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["../x", "/etc/passwd", 2**70, -1, 1e308, "$tensor", "model-0"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(["$tensor", "$array", "$tuple", "$items", "$float", "named", "../a"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=5,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:4])
    for key, value in items:
        if isinstance(value, (dict, list)):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


def mutate(data: st.DataObject, manifest: Any) -> None:
    """Something somewhere is replaced, removed, added or called otherwise."""
    path = data.draw(st.sampled_from(places(manifest)))
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    how = data.draw(st.sampled_from(["replace", "remove", "add", "rename"]))
    if how == "replace":
        parent[path[-1]] = data.draw(VALUES)
    elif how == "remove":
        parent.pop(path[-1])
    elif isinstance(parent, list):
        parent.insert(path[-1], data.draw(VALUES))
    elif how == "add":
        parent[data.draw(st.text(max_size=8))] = data.draw(VALUES)
    else:
        parent[data.draw(st.text(max_size=8) | st.sampled_from(["../a", "model-1"]))] = parent.pop(
            path[-1]
        )


@pytest.mark.filterwarnings("ignore::UserWarning")  # such as one of another strategy's state
def test_fuzzed_manifests(original: Path, tmp_path: Path) -> None:
    """Either it loads, perhaps with a warning, or it is refused and nothing has changed; never any
    other exception."""
    folder = Path(shutil.copytree(original, tmp_path / "checkpoints"))
    clean = (folder / "000001/manifest.json").read_text()
    ends = {"refused": 0, "loaded": 0}

    def body(of: Trial) -> None:
        @settings(UNHURRIED)
        @given(data=st.data())
        def fuzz(data: st.DataObject) -> None:
            (folder / "000001/manifest.json").write_text(clean)
            manifest = content(folder / "000001")
            for _ in range(data.draw(st.integers(1, 3))):
                mutate(data, manifest)
            write(folder / "000001", manifest)
            before = of.everything()
            try:
                of.run.load(folder)
            except CheckpointError:
                assert of.everything() == before
                ends["refused"] += 1
            else:
                ends["loaded"] += 1

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fuzz()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 256 << 10  # KiB

    trial(tmp_path, body)
    assert ends["refused"] > 20
    assert ends["loaded"] > 0


@settings(UNHURRIED)
@given(data=st.binary(max_size=300), name=st.sampled_from(["model-0", "rank-0", "optimizer-0"]))
def test_fuzzed_files(original: Path, data: bytes, name: str) -> None:
    """Bytes that are no tensors, under the right checksum."""
    place = original / "000001"
    file = place / f"{name}.safetensors"
    manifest, whole = (place / "manifest.json").read_text(), file.read_bytes()
    try:
        file.write_bytes(whole[: len(whole) // 2] + data)
        altered = content(place)
        seal_file(place, altered, file.name)
        write(place, altered)
        with pytest.raises(CheckpointError, match=r"last good one is .*000000"):
            checkpoint.read(place)
    finally:
        file.write_bytes(whole)
        (place / "manifest.json").write_text(manifest)


def test_the_manifest_is_as_private_as_the_tensors(original: Path) -> None:
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (original / "000001").iterdir()}
    assert modes == {0o600}


def test_state_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    itself: list[Any] = []
    itself.append(itself)

    def body(run: Run) -> None:
        for state in (deep(300), itself):
            with pytest.raises(CheckpointError, match="nested more than 200 deep"):
                run.save(state=state)
        run.save(state=deep(150))
        assert run.load() == {"state": deep(150)}

    run_world(1, body, folder=tmp_path)
