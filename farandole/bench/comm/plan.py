"""What `farandole bench comm` measures: checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farandole.bench.comm.sizes import format_size
from farandole.comm.transports.base import NATIVE
from farandole.errors import UserError, nearest
from farandole.schedule import ALGORITHMS

AUTO = "auto"
ALTERNATIVES = {"cpu": ("gloo", "mpi"), "cuda": ("nccl",)}
"""What the tensors of a device can be summed by, besides ours."""

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""Those that gloo can add."""

MEMORIES = ("registered", "plain")
"""Of ours: registered with the group, as gradients are; or as any tensor is."""

_NOT_IN_MPI = ("float16", "bfloat16")


@dataclass(frozen=True)
class BenchPlan:
    """Every size, under every algorithm of ours and every alternative."""

    sizes: tuple[int, ...]  # bytes
    algorithms: tuple[str, ...] = (AUTO,)
    against: tuple[str, ...] = ("gloo",)
    dtype: str = "float32"
    memory: str = "registered"
    device: str = "cpu"
    repeats: int = 20
    timeout_seconds: float = 60.0

    def __post_init__(self) -> None:
        _check_names("--algorithms", self.algorithms, (AUTO, NATIVE, *ALGORITHMS))
        _check_names("--device", (self.device,), tuple(ALTERNATIVES))
        _check_names(f"--device {self.device} --against", self.against, ALTERNATIVES[self.device])
        _check_names("--dtype", (self.dtype,), DTYPES)
        _check_names("--memory", (self.memory,), MEMORIES)
        if "mpi" in self.against and self.dtype in _NOT_IN_MPI:
            raise UserError(
                f"MPI has no {self.dtype}. Leave mpi out of --against, or use --dtype float32."
            )
        for size in self.sizes:
            if size < 1 or size % self.item_bytes:
                raise UserError(
                    f"--sizes: {format_size(size)} is no whole number of {self.dtype}, "
                    f"{self.item_bytes} bytes each."
                )
        if not self.sizes:
            raise UserError("--sizes: give at least one, such as 64KiB.")
        if self.repeats < 1:
            raise UserError(f"--repeats {self.repeats}: give 1 or more.")
        if not (self.timeout_seconds > 0 and math.isfinite(self.timeout_seconds)):
            raise UserError(f"--timeout {self.timeout_seconds:g}: give seconds, above 0.")

    @property
    def memory_used(self) -> str:
        """The kind of memory in results: on a GPU none is registered, whatever `memory` says."""
        return self.memory if self.device == "cpu" else "gpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def item_bytes(self) -> int:
        return self.torch_dtype.itemsize

    def arguments(self) -> list[str]:
        """What to write after `farandole bench comm` to get this plan."""
        return [
            *("--sizes", ",".join(map(str, self.sizes))),
            *("--algorithms", ",".join(self.algorithms)),
            *("--against", ",".join(self.against)),
            *("--dtype", self.dtype),
            *("--memory", self.memory),
            *("--device", self.device),
            *("--repeats", str(self.repeats)),
            *("--timeout", repr(self.timeout_seconds)),
        ]


def names(text: str) -> tuple[str, ...]:
    """A comma list; an empty text is an empty list."""
    return tuple(part.strip() for part in text.split(",")) if text.strip() else ()


def _check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    for index, name in enumerate(given):
        if name not in known:
            raise UserError(f"{option}: there is no {name!r}. {nearest(name, known)}")
        if name in given[:index]:
            raise UserError(f"{option}: {name} is given twice. Keep one.")
    if not given and "--against" not in option:
        raise UserError(f"{option}: give at least one of {', '.join(known)}.")
