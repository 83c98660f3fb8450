"""A codec at work: averages tensors over the ranks of a group, and remembers what it left out.

What every codec has in common is here: which tensors are compressed, the memory of each (by name,
so that it does not matter which tensors travel together), and what happens to numbers that are not.

Error feedback: what compression leaves out of a tensor is kept on the rank that left it out, and
added to the same tensor the next time. Nothing is lost, only late.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from farandole.comm.group import Group
from farandole.comm.tensors import is_finite
from farandole.errors import UserError

Memory = dict[str, Any]
"""What is remembered of one tensor from call to call: tensors and plain numbers, by name."""

LEFT = "left"
"""The name, in a memory, of what this rank has not sent yet."""


@dataclass(frozen=True)
class Contribution:
    """This rank's contribution to one average."""

    values: torch.Tensor  # a copy: flat, over the number of ranks, what was left over added
    shape: torch.Size
    memory: Memory

    @property
    def is_finite(self) -> bool:
        return is_finite(self.values)


@dataclass(frozen=True)
class Outcome:
    """What came of it: the sum over all ranks, flat, and what to remember if it is finite."""

    total: torch.Tensor
    memory: Memory


class SizeRule(Protocol):
    """The part of a codec that a compressor needs whatever the codec is."""

    def compresses(self, shape: Sequence[int], itemsize: int, ranks: int) -> bool:
        """Whether a tensor is compressed: it must be worth it, and get smaller."""


class Compressor(ABC):
    """Averages tensors over ranks. All ranks must call it with the same names, shapes and dtypes.

    A tensor that holds an inf or NaN on any rank comes out as NaN on every rank, as loudly as it
    would without a codec, and leaves no trace in what is remembered of it.
    """

    def __init__(self, codec: SizeRule, algorithm: str = "auto") -> None:
        self.codec: SizeRule = codec
        self._algorithm = algorithm
        self._memories: dict[str, Memory] = {}

    def average(self, tensors: Mapping[str, torch.Tensor], group: Group) -> None:
        """Averages each tensor over all ranks, in place: the same bits on every rank.

        They travel together, but each is compressed alone: the result does not depend on which
        others it travels with. Small ones, and those that would not get smaller, travel raw.
        """
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                raise UserError(
                    f"the codec {self.codec} takes floating-point tensors; {name!r} is "
                    f"{tensor.dtype}. Average it without a codec."
                )
        if group.size == 1:
            return
        raw, parts = [], {}
        for name, tensor in tensors.items():
            if self.codec.compresses(tensor.shape, tensor.itemsize, group.size):
                parts[name] = self._part(name, tensor, group.size)
            elif tensor.numel():
                raw.append(tensor)
        flats = [_flat(tensor).mul(1 / group.size) for tensor in raw]
        if self._algorithm == "auto":
            # The order of the two collectives depends on options alone, so it is the same on all
            # ranks.
            outcomes, totals = self._sum(parts, flats, group)
        else:
            totals = self._sum_raw(flats, group)
            outcomes, _ = self._sum(parts, [], group)
        for tensor, total in zip(raw, totals, strict=True):
            tensor.detach().copy_(total.view(tensor.shape))
        for name, outcome in outcomes.items():
            # The sum is the same on all ranks, so all of them see that it is not finite, and none
            # of them keeps a memory that NaN has spoilt.
            if not is_finite(outcome.total):
                outcome.total.fill_(math.nan)
            elif outcome.memory:
                self._memories[name] = outcome.memory
            tensors[name].detach().copy_(outcome.total.view(tensors[name].shape))

    def memory_of(self, name: str) -> Memory | None:
        """What is remembered of this tensor: for `put_back`, which undoes what comes after."""
        return self._memories.get(name)

    def put_back(self, name: str, memory: Memory | None) -> None:
        if memory is None:
            self._memories.pop(name, None)
        else:
            self._memories[name] = memory

    @abstractmethod
    def _sum(
        self, parts: Mapping[str, Contribution], raw: Sequence[torch.Tensor], group: Group
    ) -> tuple[dict[str, Outcome], list[torch.Tensor]]:
        """Adds up each part over all ranks, and each of `raw`, which travel along as they are.

        Like `_sum_raw` it adds in rank order, so that no sum depends on what else is added up.
        """

    def _part(self, name: str, tensor: torch.Tensor, size: int) -> Contribution:
        memory = {
            what: value.to(tensor.device) if isinstance(value, torch.Tensor) else value
            for what, value in self._memories.get(name, {}).items()
        }
        mine = to_precise(_flat(tensor))
        if LEFT in memory:
            values = torch.add(memory[LEFT], mine, alpha=1 / size)
        else:
            values = mine * (1 / size)
        return Contribution(values, tensor.shape, memory)

    def _sum_raw(self, tensors: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
        """The sums over all ranks, uncompressed; those of one dtype travel together.

        A ring adds in an order that depends on the place in the vector, and buckets are others
        after a resume. So, unless a certain algorithm was asked for, this adds in rank order.
        """
        sums = {}
        for dtype, together in join(tensors).items():
            mine = together.cpu()  # like all that travels here: any transport carries it
            if self._algorithm == "auto":
                total = torch.cat(group.all_gather(group.reduce_scatter(mine)))
            else:
                total = group.all_reduce(mine, algorithm=self._algorithm)
            sums[dtype] = total.to(together.device)
        return split(sums, tensors)

    def state_dict(self) -> dict[str, Memory]:
        """What must be saved to go on as if never stopped. It is this rank's own."""
        return {name: dict(memory) for name, memory in self._memories.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        self._memories = {name: dict(memory) for name, memory in state.items()}


def join(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, torch.Tensor]:
    """All tensors of a dtype, one after the other in a row."""
    return {
        dtype: torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dtype == dtype])
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
    }


def split(
    joined: Mapping[torch.dtype, torch.Tensor], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors again, as views; `like` is what was joined."""
    begin = dict.fromkeys(joined, 0)
    found = []
    for tensor in like:
        end = begin[tensor.dtype] + tensor.numel()
        found.append(joined[tensor.dtype][begin[tensor.dtype] : end].view(tensor.shape))
        begin[tensor.dtype] = end
    return found


def to_precise(tensor: torch.Tensor) -> torch.Tensor:
    """As sums are made: halves in float32, others as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)
