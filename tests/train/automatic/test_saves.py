"""Saves on the way, among ranks that are threads: at which steps, what stays, and what goes on."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.errors import CheckpointError, UserError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.manifest import read_manifest
from farandole.train.checkpoint.places.folder_destination import FolderDraft

SAMPLES = 24
DATA = [(torch.tensor([float(index)]), index) for index in range(SAMPLES)]


def prepared(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    run.distribute(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """The bias counts the steps."""
    optimizer.zero_grad()
    (-model(x * 0).mean()).backward()
    optimizer.step()


def saved_steps(folder: Path) -> list[int]:
    place = folder / "world/checkpoints"
    return [checkpoint.read(place / name)["run"]["steps"] for name in checkpoint.names(place)]


def train(run: Run, epochs: int, batch: int = 2) -> Iterator[tuple[int, list[int]]]:
    """Yields what this rank has read, after each step."""
    model, optimizer = prepared(run)
    for epoch in run.epochs(epochs):
        for x, indices in run.loader(DATA, batch_size=batch):  # type: ignore[arg-type]
            step(model, optimizer, x)
            yield epoch, indices.tolist()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without the warning that says what starts afresh on another number of workers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*start.? afresh")
        yield


def test_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        for _ in train(run, epochs=2):  # 6 steps each
            pass

    policy = fd.Checkpoints(every="5steps", keep=10)
    run_world(2, body, folder=tmp_path, checkpoints=policy)
    assert saved_steps(tmp_path) == [5, 10, 12]
    newest = checkpoint.newest(tmp_path / "world/checkpoints")
    assert newest is not None
    parts = checkpoint.read(newest)
    assert parts["model-0"]["bias"].item() == 12.0
    assert {"rank-0", "rank-1"} <= parts.keys()


def test_a_time_is_rank_0_s_and_all_follow(tmp_path: Path, monkeypatch: Any) -> None:
    """Ranks whose clocks are hours apart save the same steps."""

    def body(run: Run) -> None:
        for _ in train(run, epochs=1):
            pass

    clock = SimpleNamespace(monotonic=ticking(100.0))
    monkeypatch.setattr("farandole.train.checkpoint.automatic.saves.time", clock)
    run_world(2, body, folder=tmp_path, checkpoints=fd.Checkpoints(every="3min", keep=10))
    steps = saved_steps(tmp_path)
    assert steps == sorted(set(steps))
    assert len(steps) >= 2
    assert steps[-1] == 6


def ticking(seconds: float) -> Any:
    """A clock that goes on by so much whenever somebody looks at it."""
    now = [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    return clock


@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 3), (3, 1)])
def test_mid_epoch_every_sample_is_used_exactly_once(
    tmp_path: Path, quiet: None, first: int, then: int
) -> None:
    """A run that dies in the middle of its second epoch, and goes on with the script unchanged."""

    def dies(run: Run) -> list[tuple[int, list[int]]]:
        seen = []
        for epoch, indices in train(run, epochs=3):
            seen.append((epoch, indices))
            if run.steps == SAMPLES // (2 * first) + 3:
                run.wait_for_save()
                return seen  # as far as the loaders know, without an end
        raise AssertionError("it came to its end")

    def goes_on(run: Run) -> tuple[int, list[tuple[int, list[int]]]]:
        batches = list(train(run, epochs=3))
        return run.steps, batches

    policy = fd.Checkpoints(every="2steps", keep=1)
    seen = run_world(first, dies, folder=tmp_path, checkpoints=policy)
    (at,) = saved_steps(tmp_path)
    assert at % (SAMPLES // (2 * first)) != 0  # in the middle of an epoch
    used = Counter(
        (epoch, index) for batches in seen for epoch, batch in batches[:at] for index in batch
    )
    for _, batches in run_world(then, goes_on, folder=tmp_path, checkpoints=policy):
        used.update((epoch, index) for epoch, batch in batches for index in batch)
    assert used == Counter((epoch, index) for epoch in range(3) for index in range(SAMPLES))


@pytest.mark.parametrize(
    ("first", "then"),
    [("stages=2,microbatches=2", "stages=2,microbatches=2"), ("tiles=2x1", None)],
)
def test_mid_epoch_under_layouts(tmp_path: Path, quiet: None, first: str, then: str | None) -> None:
    """Two ranks hold one replica, and read the same samples."""
    images = [(torch.full((1, 4, 4), index / SAMPLES), index) for index in range(SAMPLES)]

    def batches(run: Run, layout: str | None) -> Iterator[tuple[int, list[int]]]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        trainer = run.trainer(
            model,
            lambda out, _: out.square().mean(),
            lambda ps: torch.optim.SGD(ps, 0.01),
            layout=layout,
            check=False,
        )
        for epoch in run.epochs(2):
            for x, indices in trainer.loader(images, batch_size=4):
                trainer.step(x, indices)
                yield epoch, indices.tolist()

    def dies(run: Run) -> list[tuple[int, list[int]]]:
        seen = []
        for each in batches(run, first):
            seen.append(each)
            if run.steps == 9:
                run.wait_for_save()
                return seen
        raise AssertionError("it came to its end")

    policy = fd.Checkpoints(every="4steps", keep=1)
    seen = run_world(2, dies, folder=tmp_path, checkpoints=policy)
    assert seen[0] == seen[1]
    assert saved_steps(tmp_path) == [8]
    later = run_world(2, lambda run: list(batches(run, then)), folder=tmp_path, checkpoints=policy)
    ranks = later[:1] if then is not None else later
    used = Counter((epoch, index) for epoch, batch in seen[0][:8] for index in batch)
    for rank in ranks:
        used.update((epoch, index) for epoch, batch in rank for index in batch)
    assert used == Counter((epoch, index) for epoch in range(2) for index in range(SAMPLES))


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    def body(run: Run) -> int:
        return len(list(train(run, epochs=1)))

    policy = fd.Checkpoints(every="1h")
    assert run_world(1, body, folder=tmp_path, checkpoints=policy) == [12]
    assert run_world(1, body, folder=tmp_path, checkpoints=policy) == [0]


def test_the_last_ones_and_the_best_stay(tmp_path: Path) -> None:
    accuracies = [0.5, 0.9, 0.6, 0.7, 0.8, 0.2]

    def body(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs(len(accuracies)):
            for x, _ in run.loader(DATA, batch_size=6):  # type: ignore[arg-type]
                step(model, optimizer, x)
            run.log(accuracy=accuracies[epoch], loss=1 - accuracies[epoch])

    policy = fd.Checkpoints(every="3steps", keep=2, best="accuracy")
    run_world(2, body, folder=tmp_path, checkpoints=policy)
    folder = tmp_path / "world/checkpoints"
    kept = {int(name): read_manifest(folder / name).metrics for name in checkpoint.names(folder)}
    assert len(kept) == 3
    best = kept[min(kept)]
    assert best == {"accuracy": 0.9, "loss": pytest.approx(0.1)}
    # It holds the weights that the value was measured on: those of the end of the second epoch.
    parts = checkpoint.read(folder / checkpoint.names(folder)[0])
    assert parts["run"]["steps"] == 4
    assert parts["model-0"]["bias"].item() == 4.0
    assert saved_steps(tmp_path)[-1] == 12


def test_the_lowest_loss_stays_also_after_a_restart(tmp_path: Path) -> None:
    losses = [0.5, 0.1, 0.4, 0.3, 0.3, 0.3]

    def part(epochs: int) -> None:
        def body(run: Run) -> None:
            model, optimizer = prepared(run)
            for epoch in run.epochs(epochs):
                for x, _ in run.loader(DATA, batch_size=12):  # type: ignore[arg-type]
                    step(model, optimizer, x)
                run.log(loss=losses[epoch])

        policy = fd.Checkpoints(every="2steps", keep=1, best="loss")
        run_world(1, body, folder=tmp_path, checkpoints=policy)

    for epochs in (2, 4, 6):
        part(epochs)
    assert saved_steps(tmp_path) == [4, 12]


def test_gradients_that_accumulate_are_not_cut_off(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model, optimizer = prepared(run)
        for x, _ in run.loader(DATA, batch_size=1):  # type: ignore[arg-type]
            (-model(x * 0).mean() / 4).backward()
            if run.steps % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    policy = fd.Checkpoints(every="3steps", keep=10)
    run_world(2, body, folder=tmp_path, checkpoints=policy)
    assert saved_steps(tmp_path) == [4, 8]  # and not at 12: the script ends there


def test_a_save_that_fails_costs_a_checkpoint_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, broken = FolderDraft.write, [2]

    def fail(self: FolderDraft, name: str, *rest: Any) -> dict[str, Any]:
        if name == "model-0.safetensors" and int(self.path.name.split(".")[1]) in broken:
            broken.pop(0)
            raise OSError(28, "No space left on device")
        return write(self, name, *rest)

    monkeypatch.setattr(FolderDraft, "write", fail)

    def body(run: Run) -> int:
        return len(list(train(run, epochs=1)))

    policy = fd.Checkpoints(every="1steps", keep=20)
    assert run_world(2, body, folder=tmp_path, checkpoints=policy) == [6, 6]
    told = capsys.readouterr().out
    assert told.count("No space left on device") == 1
    assert "The last good checkpoint is" in told
    assert "Training goes on" in told
    assert len(saved_steps(tmp_path)) == 5
    assert not list((tmp_path / "world/checkpoints").glob(".*.tmp"))


def test_three_failures_in_a_row_end_the_run_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FolderDraft, name: str, *rest: Any) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FolderDraft, "write", fail)

    def body(run: Run) -> str:
        with pytest.raises(CheckpointError) as caught:
            list(train(run, epochs=2))
        return str(caught.value)

    for said in run_world(2, body, folder=tmp_path, checkpoints=fd.Checkpoints(every="1steps")):
        assert "3 automatic saves in a row have failed" in said
        assert "No space left on device" in said


def test_a_loop_over_other_data_ends_its_steps_itself(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        model, optimizer = prepared(run)
        for _ in range(5):
            step(model, optimizer, torch.ones(2, 1))
            run.end_step()

    policy = fd.Checkpoints(every="2steps")
    run_world(1, body, folder=tmp_path, checkpoints=policy)
    biases = [
        checkpoint.read(tmp_path / "world/checkpoints" / name)["model-0"]["bias"].item()
        for name in checkpoint.names(tmp_path / "world/checkpoints")
    ]
    assert biases == [2.0, 4.0]


def test_a_scheduler_must_be_restored_by_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = fd.Checkpoints(every="2steps")

    def scheduled(run: Run, *, gives: bool, loads: bool) -> int:
        model, optimizer = prepared(run)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        if gives:
            run.checkpoint_state(lambda: {"schedule": schedule.state_dict()})
        if loads and (state := run.load()):
            schedule.load_state_dict(state["schedule"])
        for _ in run.epochs(2):
            for x, _ in run.loader(DATA, batch_size=6):  # type: ignore[arg-type]
                step(model, optimizer, x)
                schedule.step()
                if run.steps == 3 and not run.resumed:
                    run.wait_for_save()
                    return int(schedule.last_epoch)
        return int(schedule.last_epoch)

    def once(*, gives: bool, loads: bool) -> int:
        (count,) = run_world(
            1,
            lambda run: scheduled(run, gives=gives, loads=loads),
            folder=tmp_path,
            checkpoints=policy,
        )
        return count

    assert once(gives=False, loads=False) == 3
    assert "run.checkpoint_state(lambda" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"Call run\.load\(\)"):
        once(gives=False, loads=False)
    for path in sorted((tmp_path / "world/checkpoints").iterdir()):
        path.rename(tmp_path / path.name)  # begins anew
    assert once(gives=True, loads=True) == 3
    assert "run.checkpoint_state(lambda" not in capsys.readouterr().out
    assert once(gives=True, loads=True) == 8
