"""Who takes part: an algorithm of ours, gloo and NCCL as PyTorch has them, MPI as mpi4py has it."""

from __future__ import annotations

import faulthandler
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from farandole.comm import C10d, Group
from farandole.comm.gpu_sharing import nccl_text
from farandole.errors import CommError, UserError


class Side(Protocol):
    """Something that can sum a tensor over all ranks, in place."""

    name: str

    def bind(self, tensor: torch.Tensor) -> Callable[[], object]:
        """A call that does it to `tensor`; whatever can be prepared is done now."""


class Ours:
    def __init__(self, group: Group, algorithm: str) -> None:
        self.name = algorithm
        self._group = group

    def bind(self, tensor: torch.Tensor) -> Callable[[], object]:
        return partial(self._group.all_reduce, tensor, algorithm=self.name)


class Gloo:
    """`torch.distributed.all_reduce` on the job's own process group."""

    name = "gloo"

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise CommError("--against gloo: this job has no process group of PyTorch's.")

    def bind(self, tensor: torch.Tensor) -> Callable[[], object]:
        return partial(dist.all_reduce, tensor)


class Nccl:
    """The same, of tensors on GPUs."""

    name = "nccl"

    def __init__(self, group: Group) -> None:
        carrier = group.transport.carrier(torch.empty(0, device="cuda"))
        if not (isinstance(carrier, C10d) and carrier.has_nccl):
            raise UserError(
                f"--against nccl: NCCL {nccl_text()} does not serve these ranks, which share a "
                "GPU. Take 2.30 or later, one rank a GPU, or leave it out: --against ''."
            )

    def bind(self, tensor: torch.Tensor) -> Callable[[], object]:
        return partial(dist.all_reduce, tensor)


class Mpi:
    """`MPI_Allreduce` in place. It waits for ever: `measure` puts a limit on it."""

    name = "mpi"

    def __init__(self, group: Group) -> None:
        # Importing it starts MPI, which waits for all ranks and holds the interpreter's lock.
        faulthandler.dump_traceback_later(group.timeout.total_seconds(), exit=True)
        try:
            mpi: Any = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"--against mpi: mpi4py cannot be used ({error}). pip install mpi4py, and an MPI: "
                "apt install openmpi-bin; or leave mpi out."
            ) from error
        finally:
            faulthandler.cancel_dump_traceback_later()
        self._world, self._in_place = mpi.COMM_WORLD, mpi.IN_PLACE
        self.library: str = mpi.Get_library_version().splitlines()[0].strip("\0 ")
        seen = (self._world.Get_rank(), self._world.Get_size())
        if seen != (group.rank, group.size):
            raise UserError(
                f"--against mpi: this is rank {group.rank} of {group.size}, but for MPI rank "
                f"{seen[0]} of {seen[1]}. Start it with the mpirun of the MPI that mpi4py found: "
                f"{self.library}"
            )

    def bind(self, tensor: torch.Tensor) -> Callable[[], object]:
        return partial(self._world.Allreduce, self._in_place, tensor.numpy())

    def abandon(self) -> None:
        """After a failure. MPI_Finalize would wait for every rank, also for one that is lost; so
        the end of this process is MPI_Abort instead, and mpirun ends the others."""
        importlib.import_module("mpi4py.run").set_abort_status(1)


class Listener:
    """A trace that only remembers how the last all-reduce was done."""

    def __init__(self) -> None:
        self.algorithm = ""
        self.transport = ""

    def span(
        self, name: str, category: str, **details: str | int | float
    ) -> AbstractContextManager[None]:
        if name == "all_reduce":
            self.algorithm, self.transport = str(details["algorithm"]), str(details["by"])
        return nullcontext()


@contextmanager
def listening(group: Group) -> Iterator[Listener]:
    """Inside, the listener hears what the group really does, whatever it was asked for."""
    before, listener = group.trace, Listener()
    group.trace = listener
    try:
        yield listener
    finally:
        group.trace = before
