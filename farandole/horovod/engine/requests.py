"""What one rank asks for: a collective by its name, and all that the ranks must agree on.

A request says nothing of the numbers, so it can be sent around, compared and kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER, BARRIER = "alltoall", "reducescatter", "barrier"
ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"

Shape = tuple[int, ...]


class Request(NamedTuple):
    """One or several tensors under one name: what is grouped is asked for, and done, as one."""

    name: str
    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    splits: tuple[int, ...] = ()  # of an alltoall: rows to each rank; of a process set: its ranks
    without: tuple[str, ...] = ()  # of gradients: the variables of the model that are not in it

    @property
    def nbytes(self) -> int:
        widths = (dtype_bytes(dtype) for dtype in self.dtypes)
        return sum(
            width * math.prod(shape) for width, shape in zip(widths, self.shapes, strict=True)
        )

    @property
    def is_lasting(self) -> bool:
        """Whether it may well come again: a name that was counted up will not."""
        return ".noname." not in self.name

    @classmethod
    def read(cls, value: list[Any]) -> Request:
        """From JSON, which has lists only."""
        name, kind, dtypes, shapes, op, root, prescale, postscale, device, splits, without = value
        return cls(
            name,
            kind,
            tuple(dtypes),
            tuple(map(tuple, shapes)),
            op,
            root,
            prescale,
            postscale,
            device,
            tuple(splits),
            tuple(without),
        )

    def __str__(self) -> str:
        """For an error: what this rank has asked for, without the name."""
        tensors = [f"{d} {s}" for d, s in zip(self.dtypes, self.shapes, strict=True)]
        parts = [", ".join(tensors[:3]) + (", …" if len(tensors) > 3 else "")] if tensors else []
        if self.op:
            parts.append(f"op {self.op}")
        if self.root >= 0:
            parts.append(f"root rank {self.root}")
        if (self.prescale, self.postscale) != (1.0, 1.0):
            parts.append(f"scaled by {self.prescale:g} before and {self.postscale:g} after")
        if self.device != "cpu":
            parts.append(f"on {self.device}")
        if self.splits:
            parts.append(f"splits {list(self.splits)}")
        if self.without:
            more = ", …" if len(self.without) > 3 else ""
            parts.append(f"without {', '.join(self.without[:3])}{more}")
        return f"{self.kind}({', '.join(parts)})"


def dtype_bytes(dtype: str) -> int:
    """The width of a dtype by its name."""
    digits = "".join(filter(str.isdigit, dtype.partition("_")[0]))
    return int(digits) // 8 if digits else 1  # bool
