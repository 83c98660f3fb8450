"""Saves in the background: what was saved, when it is there, and what becomes of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from farandole.errors import CheckpointError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.places.folder_destination import FolderDraft

SCRIPT = Path(__file__).parent / "scripts" / "background_fails.py"

STATE: dict[str, Any] = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 3),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "flags": torch.tensor([True, False, True]),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "small": torch.tensor([-1, 2], dtype=torch.int8),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "long": torch.tensor([2**40]),
    "nested": [{"same": torch.ones(2)}, (1, "text", float("inf"))],
}


def prepared(run: Run) -> nn.Linear:
    model = nn.Linear(4, 4)
    run.distribute(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    return model


def test_it_holds_what_was_there_when_it_was_called(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[Path, Path, Path | None, dict[str, Any] | None]:
        model = prepared(run)
        blocking = run.save(**STATE)
        background = run.save(background=True, **STATE)
        with torch.no_grad():
            model.weight.fill_(7.0)  # while it is being written
        third = run.save(background=True, number=3)  # waits for the second
        assert background.is_dir()
        waited = run.wait_for_save()
        assert run.wait_for_save() is None
        assert waited == third
        return blocking, background, waited, run.load()

    (blocking, background, third, loaded), other = run_world(2, body, folder=tmp_path)
    assert other[:3] == (blocking, background, third)
    assert loaded == {"number": 3}
    one, two = checkpoint.read(blocking), checkpoint.read(background)
    assert one.keys() == two.keys()
    for name in ("model-0", "state"):
        assert str(one[name]) == str(two[name])
    assert torch.equal(two["state"]["turned"], STATE["turned"])
    assert two["state"]["float8"].dtype is torch.float8_e4m3fn
    assert third is not None
    assert checkpoint.read(third)["model-0"]["weight"].unique().tolist() == [7.0]
    assert load_file(third / "model-0.safetensors")["weight"].shape == (4, 4)
    for folder in (background, third):
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        names = {path.name for path in folder.iterdir()}
        assert all(name == "manifest.json" or name.endswith(".safetensors") for name in names)
    assert not [path for path in third.parent.iterdir() if path.name.endswith(".tmp")]


def test_the_memory_of_the_copy_is_used_again(tmp_path: Path) -> None:
    def body(run: Run) -> set[int]:
        prepared(run)
        places = set()
        for _ in range(3):
            run.save(background=True)
            run.wait_for_save()
            buffers = run._saving._checkpoints._background._snapshots._buffers
            places.add(buffers["model-0", False].data_ptr())
        return places

    (places,) = run_world(1, body, folder=tmp_path)
    assert len(places) == 1


def test_what_is_not_finite_is_marked(tmp_path: Path) -> None:
    def body(run: Run) -> Path | None:
        model = prepared(run)
        with torch.no_grad():
            model.bias[0] = float("nan")
        run.save(background=True)
        return run.wait_for_save()

    (made,) = run_world(1, body, folder=tmp_path)
    assert made is not None
    assert list(checkpoint.not_finite(made)) == ["model-0: bias"]


def test_what_cannot_be_saved_is_said_at_once(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        prepared(run)
        with pytest.raises(CheckpointError, match="which cannot be saved or sent"):
            run.save(background=True, wrong={1, 2})
        assert run.wait_for_save() is None
        run.save()

    run_world(2, body, folder=tmp_path)
    assert [path.name for path in checkpoint._all(tmp_path / "world/checkpoints")] == ["000000"]


def test_a_failure_on_any_rank_is_raised_by_the_next_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FolderDraft.write

    failures = [1]

    def fail_once(self: FolderDraft, name: str, *rest: Any) -> dict[str, Any]:
        if name == "rank-1.safetensors" and failures:
            failures.pop()
            raise OSError(28, "No space left on device")
        return write(self, name, *rest)

    monkeypatch.setattr(FolderDraft, "write", fail_once)

    def body(run: Run) -> str:
        prepared(run)
        run.save(number=0)
        run.save(background=True, number=1)
        with pytest.raises(CheckpointError) as caught:
            run.save(number=2)
        run.save(background=True, number=3)
        run.wait_for_save()
        return str(caught.value)

    first, second = run_world(2, body, folder=tmp_path)
    for message in (first, second):
        assert "rank 1: [Errno 28] No space left on device" in message
        assert "in the background" in message
    assert "The last good checkpoint is" in first
    folder = tmp_path / "world/checkpoints"
    left = [checkpoint.read(path)["state"]["number"] for path in checkpoint._all(folder)]
    assert left == [0, 3]
    assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_a_failure_at_the_end_of_the_run_shows_in_the_exit_code(
    sandbox: Any, tmp_path: Path
) -> None:
    done = sandbox.fork(SCRIPT, tmp_path)
    assert "the script has done its part" in done.stdout
    assert done.returncode == 1
    assert "CheckpointError: could not save to" in done.stderr
    assert "File too large" in done.stderr
    folder = tmp_path / "fails/checkpoints"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["000000"]
    assert checkpoint.read(folder / "000000")["state"]["number"] == 1
