"""All ranks have rank 0's buffers, whatever they are and however the model changes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from farandole.errors import ModelMismatchError
from farandole.sync.allreduce.buffer_spread import BufferSpread
from farandole.testing import run_world
from farandole.train import Run


class Odd(nn.Module):
    """Buffers of many kinds: not in a row, of one number, of none, twice."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("flag", torch.tensor(rank == 0))
        self.register_buffer("column", torch.full((2, 4), float(rank + 1)).double().t())
        self.register_buffer("pairs", torch.tensor([1 + 2j, 3j]) * (rank + 1))
        self.register_buffer("short", torch.full((5,), rank + 0.5, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("absent", None)
        self.register_buffer("again", self.short, persistent=False)
        assert self.norm.running_mean is not None
        self.norm.running_mean.fill_(float(rank))


def values(model: nn.Module) -> list[object]:
    return [(name, buffer.tolist()) for name, buffer in model.named_buffers()]


def test_every_kind_of_buffer(tmp_path: Path) -> None:
    def body(run: Run) -> list[list[object]]:
        model = Odd(run.rank)
        buffers = BufferSpread(model, run.group)
        seen = []

        def look() -> None:
            buffers.spread()
            seen.append(values(model))

        look()
        model.norm.running_var.fill_(7.0 - run.rank)  # type: ignore[union-attr,operator]
        look()
        model.short.data = torch.full((2,), float(run.rank), dtype=torch.bfloat16)  # type: ignore[union-attr]
        look()  # the same tensor with other memory, of another length
        model.register_buffer("late", torch.tensor([run.rank + 5]))
        look()
        model.column = model.column.float() + run.rank  # another tensor under the old name
        look()
        model.more = nn.BatchNorm1d(2)
        model.more.running_mean.fill_(float(run.rank + 3))  # type: ignore[union-attr,operator]
        buffers.look_for_modules()
        look()
        return seen

    first, *others = run_world(3, body, folder=tmp_path)
    assert all(other == first for other in others)
    found = [dict(each) for each in first]  # type: ignore[call-overload]
    assert found[0]["norm.running_mean"] == [0.0] * 3
    assert found[0]["flag"] is True
    assert found[0]["pairs"] == [1 + 2j, 3j]
    assert found[1]["norm.running_var"] == [7.0] * 3
    assert found[2]["short"] == [0.0, 0.0]
    assert found[3]["late"] == [5]
    assert found[5]["more.running_mean"] == [3.0, 3.0]


def test_a_model_without_buffers(tmp_path: Path) -> None:
    def body(run: Run) -> int:
        BufferSpread(nn.Linear(2, 2), run.group).spread()
        return run.group.meter.bytes_sent

    assert run_world(2, body, folder=tmp_path) == [0, 0]


def test_buffers_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    """Also where they have as many bytes."""

    def body(run: Run) -> None:
        model = nn.BatchNorm1d(3)
        buffers = BufferSpread(model, run.group)
        buffers.spread()
        kind = torch.float32 if run.rank else torch.int32
        model.register_buffer("late", torch.ones(4, dtype=kind))
        buffers.spread()

    with pytest.raises(ModelMismatchError, match=r"'late' is .*int32.* on rank 0"):
        run_world(2, body, folder=tmp_path)
