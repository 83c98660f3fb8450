"""What an asynchronous call returns, and how to wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from farandole.comm.tensors import kind_of
from farandole.errors import UserError
from farandole.horovod import session
from farandole.horovod.common.process_sets import ProcessSet
from farandole.horovod.engine.engine import Engine
from farandole.horovod.engine.requests import Request
from farandole.horovod.engine.work import Work

Finish = Callable[[list[torch.Tensor]], Any]


class Handle:
    """A collective under way. Pass it to `hvd.synchronize` or `hvd.poll`."""

    __slots__ = ("_engine", "_finish", "_work")

    def __init__(self, engine: Engine, work: Work, finish: Finish) -> None:
        self._engine = engine
        self._work = work
        self._finish = finish

    def done(self) -> bool:
        return self._engine.is_done(self._work)

    def wait(self) -> Any:
        self._engine.wait(self._work)
        return self._finish(self._work.outputs)


def poll(handle: Handle) -> bool:
    """Whether the collective is done, so that `synchronize` would return at once.

    One that has failed is done: `synchronize` raises what went wrong.
    """
    return _checked(handle).done()


def synchronize(handle: Any) -> Any:
    """Waits until the collective is done; returns its result.

    Raises `HorovodInternalError` when it failed.
    """
    if callable(handle):  # of a sparse all-reduce
        return handle()
    return _checked(handle).wait()


def _checked(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise UserError(f"{handle!r} is not a handle that an asynchronous hvd function returned.")
    return handle


def submit(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    outputs: list[torch.Tensor] | None,
    process_set: ProcessSet,
    finish: Finish,
    *,
    quiet: bool,
    grouped: bool = False,
    op: str = "",
    root: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    splits: tuple[int, ...] = (),
    without: tuple[str, ...] = (),
) -> Handle:
    """Asks for a collective of this kind. `quiet`: the caller is about to wait for it.

    What is `grouped` has names of its own: it may be in flight beside a tensor of the same name.
    """
    here = session.current()
    engine = here.engine(process_set)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UserError(
                f"{kind} of a {tensor.layout} tensor: make it dense, or use sparse_allreduce_async."
            )
    for output in outputs or ():
        _require_room(output, kind)
    label = f"grouped_{kind}" if grouped else kind
    request = Request(
        f"{label}.{name}" if name is not None else _counted(here, process_set, label),
        kind,
        tuple(kind_of(tensor.dtype) for tensor in tensors),
        tuple(tuple(tensor.shape) for tensor in tensors),
        op,
        root,
        prescale,
        postscale,
        tensors[0].device.type if tensors else "cpu",
        splits,
        without,
    )
    work = Work(request, list(tensors), outputs)
    engine.submit(work, quiet=quiet)
    return Handle(engine, work, finish)


def _counted(here: session.Session, process_set: ProcessSet, label: str) -> str:
    """A name for what has none: the ranks must then ask in the same order."""
    key = (process_set.process_set_id or 0, label)
    here.counters[key] += 1
    return f"{label}.noname.{here.counters[key]}"


def _require_room(output: torch.Tensor, kind: str) -> None:
    """Found out later, it would end the job on all ranks."""
    if not output.is_contiguous() and 0 in output.stride() and output.numel() > 1:
        raise UserError(
            f"{kind} cannot write to a tensor in which several elements share the same memory, as "
            "expand() makes it. Give it a clone()."
        )


def first(outputs: list[torch.Tensor]) -> torch.Tensor:
    return outputs[0]


def tensor_or_error(value: Any, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UserError(f"{what} wants a tensor, not a {type(value).__name__}.")
    return value


def tensors_or_error(values: Any, what: str) -> list[torch.Tensor]:
    if not isinstance(values, Iterable):
        raise UserError(f"{what} wants several tensors, not a {type(values).__name__}.")
    found = [tensor_or_error(value, what) for value in values]
    if not found:
        raise UserError(f"{what} wants at least one tensor.")
    if len({tensor.device.type for tensor in found}) > 1:
        raise UserError(f"{what} wants all tensors on one kind of device.")
    return found
