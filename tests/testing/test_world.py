"""The in-process world: real runs on threads, the same bits every time, failures in the open."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from farandole.errors import CommError
from farandole.sync import AllReduce
from farandole.testing import run_world
from farandole.topology import Topology
from farandole.train import Run

if TYPE_CHECKING:
    from conftest import Sandbox

LOOKS_FOR_IMPORTS = """
import sys
from pathlib import Path
from farandole.testing import run_world
print(run_world(2, lambda run: "torch._dynamo" in sys.modules, folder=Path("runs")))
"""


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    topology = Topology.from_names(["left", "left", "right"])

    def body(run: Run) -> tuple[int, int, int, int, str]:
        return run.rank, run.size, run.local_rank, run.local_size, run.host

    assert run_world(3, body, folder=tmp_path, topology=topology) == [
        (0, 3, 0, 2, "left"),
        (1, 3, 1, 2, "left"),
        (2, 3, 0, 1, "right"),
    ]


def test_results_come_in_rank_order_whoever_is_first(tmp_path: Path) -> None:
    turn = threading.Event()

    def body(run: Run) -> int:
        if run.rank == 0:
            turn.wait(10)
        else:
            turn.set()
        return run.rank * 10

    assert run_world(2, body, folder=tmp_path) == [0, 10]


def trained(run: Run) -> bytes:
    """The bytes of a small net, with BatchNorm over all ranks, after two epochs."""
    generator = torch.Generator().manual_seed(4)
    data = TensorDataset(
        torch.randn(50, 8, generator=generator), torch.randint(3, (50,), generator=generator)
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    wrapped, optimizer = run.distribute(model, torch.optim.Adam(model.parameters(), 0.01))
    for _ in run.epochs(2):
        for x, y in run.loader(data, global_batch_size=12):
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
    return b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())


@pytest.mark.parametrize("size", [1, 4])
def test_the_same_bits_every_time_and_on_every_rank(tmp_path: Path, size: int) -> None:
    sync = AllReduce(batchnorm="sync", bucket_mib=0.0005)
    seen = {
        state for _ in range(4) for state in run_world(size, trained, folder=tmp_path, sync=sync)
    }
    assert len(seen) == 1
    assert seen != set(run_world(size, trained, folder=tmp_path, sync=sync, seed=1))


def test_the_first_failure_is_raised_as_it_was(tmp_path: Path) -> None:
    class OddError(Exception):
        pass

    def body(run: Run) -> None:
        if run.rank == 2:
            raise OddError("of rank two")
        run.group.barrier()

    with pytest.raises(OddError, match="of rank two") as caught:
        run_world(4, body, folder=tmp_path)
    assert any(entry.name == "body" for entry in caught.traceback)  # where it happened


def test_even_an_exit_is_raised(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        if run.rank == 1:
            raise SystemExit(3)
        run.mean(1.0)

    with pytest.raises(SystemExit):
        run_world(2, body, folder=tmp_path)


def test_a_rank_that_leaves_early_is_missed(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        if run.rank != 1:
            run.mean(1.0)

    with pytest.raises(CommError, match=r"rank 1 did not answer within 0\.3 s"):
        run_world(2, body, folder=tmp_path, timeout=timedelta(seconds=0.3))


def test_no_thread_is_left(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        run.group.barrier()
        raise ValueError("all of us")

    before = threading.active_count()
    with pytest.raises(ValueError, match="all of us"):
        run_world(4, body, folder=tmp_path)
    assert threading.active_count() == before


def test_no_rank_imports_what_registers_operators(sandbox: Sandbox) -> None:
    """In the middle of other ranks' work that has ended processes by a segmentation fault."""
    script = sandbox.script("world.py", LOOKS_FOR_IMPORTS)
    done = sandbox.python(script)
    assert done.stdout == "[True, True]\n", done.stderr


def test_worlds_do_not_meet(tmp_path: Path) -> None:
    """One inside another, as when a rank tests something of its own."""

    def outer(run: Run) -> list[float]:
        inner = run_world(2, lambda other: other.sum(1.0), folder=tmp_path / str(run.rank))
        return [*inner, run.sum(1.0)]

    assert run_world(3, outer, folder=tmp_path) == [[2.0, 2.0, 3.0]] * 3


def test_the_strategy_and_the_seed_are_the_run_s(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[str, int]:
        run.distribute(nn.Linear(1, 1))
        return str(run.settings.sync), run.seed

    strategy = AllReduce(bucket_mib=3)
    results = run_world(2, body, folder=tmp_path, sync=strategy, seed=7)
    assert results == [("allreduce:bucket_mib=3", 7)] * 2
