"""What survivors of a lost worker leave, and what the next attempt makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.errors import CheckpointError, CommError, StageError
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.manifest import file_of
from farandole.train.checkpoint.places.destination import Keeping
from farandole.train.checkpoint.places.folder_destination import FolderDestination
from farandole.train.checkpoint.save_folder import SaveFolders
from farandole.train.checkpoint.saver import PartSaver
from farandole.train.checkpoint.survivors.joining import join_survivors
from farandole.train.checkpoint.survivors.leaving import FOLDER, PLACE, SurvivorSaves
from farandole.train.randomness import random_state_from

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[2] / "launch" / "scripts" / "restarted.py"
CPU = torch.device("cpu")


def weights(run: Path) -> dict[str, bytes]:
    newest = max((run / "checkpoints").glob("[0-9]*"))
    return {path.name: path.read_bytes() for path in sorted(newest.glob("[mo]*.safetensors"))}


def steps_made(sandbox: Sandbox, name: str) -> dict[tuple[int, int], list[int]]:
    """By attempt and rank."""
    made: dict[tuple[int, int], list[int]] = {}
    for line in (sandbox.folder / f"steps-{name}").read_text().splitlines():
        rank, attempt, step = map(int, line.split())
        made.setdefault((attempt, rank), []).append(step)
    return made


def test_no_step_is_repeated_wherever_in_a_step_a_worker_is_killed(sandbox: Sandbox) -> None:
    """Two replicas of two stages. There is no checkpoint but those of what survivors leave."""
    words = ["-n", "4", "--layout", "stages=2,microbatches=2,balance=2+2"]
    policy = ["--checkpoint", "every=1000steps"]
    peace = sandbox.farandole("run", *words, *policy, "--name", "peace", SCRIPT)
    assert peace.returncode == 0, peace.stderr
    doomed = ["3:3:kill:0:loss", "0:5:kill:1:update", "1:9:kill:2:after", "2:13:kill:3:before"]
    restarts = ["--restarts", "9", "--name", "struck"]
    done = sandbox.farandole("run", *words, *policy, *restarts, SCRIPT, *doomed)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("start again (") == 4
    assert "from what the survivors have left" in done.stderr

    runs = sandbox.folder / "runs"
    assert weights(runs / "struck") == weights(runs / "peace")
    assert not (runs / "struck" / "checkpoints" / FOLDER).exists()
    made = steps_made(sandbox, "struck")
    first = [min(made[attempt, 0]) for attempt in range(5)]
    # In the update and after the step, all had agreed on steps 5 and 9 before; else it is repeated.
    assert first == [1, 3, 6, 10, 13]


def test_a_part_without_a_survivor_means_the_last_checkpoint(sandbox: Sandbox) -> None:
    words = ["-n", "4", "--layout", "stages=2,microbatches=2,balance=2+2", "--name", "struck"]
    policy = ["--checkpoint", "every=4steps", "--restarts", "2"]
    doomed = ["1:11:kill:0", "3:11:kill:0"]  # both replicas of the second stage
    done = sandbox.farandole("run", *words, *policy, SCRIPT, *doomed)
    assert done.returncode == 0, done.stderr
    first = min(steps_made(sandbox, "struck")[1, 0])
    # That of step 4 was finished when the next one began. That may still be under way.
    assert first in (5, 9)
    assert f"from runs/struck/checkpoints/{first // 4 - 1:06}" in done.stderr


# Without processes


def leave(folder: Path, rank: int, steps: int, *, places: int = 2, size: int = 4) -> Path:
    """What a rank would leave, as far as it matters here."""
    place = rank % places
    parts: dict[str, Any] = {
        "run": {"steps": steps, "size": size},
        "state": {},
        PLACE: {"place": place, "places": places},
        f"rank-{rank}": {"random": random_state_from(rank, CPU), "sync": [{"place": place}]},
        f"model-0.{place}": {f"weight{place}": torch.full((2,), float(steps))},
    }
    target = folder / FOLDER / "0" / str(rank) / f"{steps:06d}"
    draft = checkpoint.begin(target)
    return checkpoint.commit(draft, target, [checkpoint.write_parts(draft, parts)])


def save(folder: Path, steps: int) -> None:
    target = folder / "000000"
    draft = checkpoint.begin(target)
    checkpoint.commit(draft, target, [checkpoint.write_parts(draft, {"run": {"steps": steps}})])


def join(folder: Path, attempt: int = 1) -> dict[str, Any] | None:
    destination = FolderDestination(folder, SaveFolders(), Keeping(3))
    made = join_survivors(
        destination, attempt, lambda rank, steps: random_state_from(100 + rank + steps, CPU)
    )
    assert not (folder / FOLDER).exists()
    return None if made is None else checkpoint.read(made)


def test_lost_ranks_get_what_their_twins_have_but_another_random_state(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        leave(tmp_path, rank, 7)
    parts = join(tmp_path)
    assert parts is not None
    assert parts["run"]["steps"] == 7
    assert parts["model-0.1"]["weight1"].tolist() == [7.0, 7.0]
    assert parts["rank-3"]["sync"] == parts["rank-1"]["sync"] == [{"place": 1}]
    states = [parts[f"rank-{rank}"]["random"]["torch"] for rank in range(4)]
    assert all(not torch.equal(states[3], other) for other in states[:3])


@pytest.mark.parametrize("attempt", [0, 2])
def test_another_jobs_leavings_are_removed_and_not_used(tmp_path: Path, attempt: int) -> None:
    for rank in range(4):
        leave(tmp_path, rank, 7)
    assert join(tmp_path, attempt) is None


def test_a_newer_checkpoint_wins(tmp_path: Path) -> None:
    for rank in range(4):
        leave(tmp_path, rank, 7)
    save(tmp_path, 7)
    assert join(tmp_path) is None
    for rank in range(4):
        leave(tmp_path, rank, 8)
    parts = join(tmp_path)
    assert parts is not None
    assert parts["run"]["steps"] == 8


def test_what_is_damaged_counts_as_lost(tmp_path: Path) -> None:
    for rank in (1, 2, 3):
        leave(tmp_path, rank, 7)
    (leave(tmp_path, 0, 7) / "manifest.json").write_text("{}")
    parts = join(tmp_path)
    assert parts is not None
    assert parts["rank-0"]["sync"] == [{"place": 0}]


def test_a_damaged_tensor_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    for rank in range(4):
        path = leave(tmp_path, rank, 7) / file_of(f"model-0.{rank % 2}")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="checksum"):
        join(tmp_path)


class OneModel(list[str]):
    synchronizers = (SimpleNamespace(state_dict=dict),)


class Held(PartSaver):
    """One weight, which `step` counts up."""

    def __init__(self) -> None:
        self.place, self.places, self.suffix = 0, 1, ".0"
        self.weight = torch.zeros(1)

    def held(self, changed: Mapping[str, Any]) -> Any:
        return {"weight": self.weight.clone()}, {}

    def copied_buffers(self) -> dict[str, torch.Tensor]:
        return {}


def protected(folder: Path, *, lost_in_meeting: bool = False) -> tuple[SurvivorSaves, Held]:
    def barrier() -> None:
        if lost_in_meeting:
            raise CommError("rank 1 is gone")

    group = SimpleNamespace(barrier=barrier)
    session: Any = SimpleNamespace(
        rank=0, device=CPU, group=group, models=OneModel(["model"]), reporter=None
    )
    counted = itertools.count(6)
    found = SurvivorSaves(session, folder, 0, lambda: {"steps": next(counted), "size": 1}, dict)
    saver = Held()
    found.protect(saver)
    return found, saver


def left(folder: Path) -> dict[int, float]:
    """By the number of steps, the weight."""
    paths = (folder / FOLDER / "0" / "0").glob("[0-9]*")
    return {int(p.name): float(checkpoint.read(p)["model-0.0"]["weight"]) for p in paths}


def test_the_state_before_the_step_is_left(tmp_path: Path) -> None:
    saves, _ = protected(tmp_path)
    saves.between_steps()
    with pytest.raises(CommError), saves.step():
        raise CommError("rank 1 is gone")
    assert left(tmp_path) == {6: 0.0}


def test_nothing_is_left_once_weights_have_begun_to_change(tmp_path: Path) -> None:
    """By an optimizer that fails, or in a second step with the same batch."""
    saves, saver = protected(tmp_path)
    saves.between_steps()

    def fail_half_way() -> None:
        saves.meet()
        saver.weight += 1
        raise StageError("the optimizer fails half-way")

    with pytest.raises(StageError), saves.step():
        fail_half_way()
    with pytest.raises(CommError), saves.step():
        raise CommError("rank 1 is gone")
    assert left(tmp_path) == {}


def test_lost_in_the_meeting_both_states_are_left(tmp_path: Path) -> None:
    saves, saver = protected(tmp_path, lost_in_meeting=True)
    saves.between_steps()
    with saves.step():
        saves.meet()
        saver.weight += 1
    with pytest.raises(CommError, match="rank 1 is gone"):
        saves.between_steps()
    assert left(tmp_path) == {6: 0.0, 7: 1.0}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), places=st.integers(1, 3), replicas=st.integers(1, 3))
def test_as_long_as_each_place_has_a_survivor_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, places: int, replicas: int
) -> None:
    """Whoever is lost, wherever the others are when they hear of it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    size = places * replicas
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    survivors = set(range(size)) - lost
    # Where nobody is `before` the meeting of step 7, any of them may have come out of it.
    has_met = data.draw(st.booleans())
    fates = ["meeting", "after"] if has_met else ["before", "meeting"]
    for rank in survivors:
        fate = data.draw(st.sampled_from(fates))
        if fate != "after":
            leave(folder, rank, 6, places=places, size=size)
        if fate != "before":
            leave(folder, rank, 7, places=places, size=size)
    if {rank % places for rank in survivors} != set(range(places)):
        assert join(folder) is None
        return
    parts = join(folder)
    assert parts is not None
    values = {
        value for i in range(places) for value in parts[f"model-0.{i}"][f"weight{i}"].tolist()
    }
    assert values == {float(parts["run"]["steps"])}
    assert {f"rank-{rank}" for rank in range(size)} <= parts.keys()
