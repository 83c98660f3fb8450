"""The files by which `horovod.run()` and its workers exchange a call and its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from farandole.errors import LaunchError, NotSerializableError, UserError
from farandole.horovod.runner.reference import Reference
from farandole.serialization.files import read_value, write_value
from farandole.topology import Topology


class Call(NamedTuple):
    """A function by reference, and its arguments."""

    function: Reference
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Call:
        return cls(Reference.to(func), tuple(args), dict(kwargs or {}))

    def write(self, folder: Path) -> None:
        """Raises `UserError` for an argument that cannot be sent."""
        value = {
            "function": self.function.as_dict(),
            "args": self.args,
            "kwargs": self.kwargs,
        }
        _write(_call_file(folder), value, "an argument of horovod.run()")

    @classmethod
    def read(cls, folder: Path) -> Call:
        found = read_value(_call_file(folder))
        return cls(Reference(**found["function"]), found["args"], found["kwargs"])


def write_result(folder: Path, rank: str, result: Any, function: str) -> None:
    """In a worker. Raises `UserError` for a result that cannot be sent."""
    what = f"what {function}() returned on rank {rank}"
    _write(_result_file(folder, rank), result, what)


def read_result(folder: Path, topology: Topology, rank: int) -> Any:
    """Raises `LaunchError` if the worker left none."""
    path = _result_file(folder, str(rank))
    if not path.exists():
        raise LaunchError(
            f"rank {rank} on {topology.host(rank).name} has ended and left no result. Do the hosts "
            f"share the folder {folder.parent}? The function must return, not end its process."
        )
    return read_value(path)


def _call_file(folder: Path) -> Path:
    return folder / "call.safetensors"


def _result_file(folder: Path, rank: str) -> Path:
    return folder / f"result-{rank}.safetensors"


def _write(path: Path, value: Any, what: str) -> None:
    try:
        write_value(path, value)
    except NotSerializableError as error:
        raise UserError(
            f"{what} cannot be sent between processes: {error.place or 'it'} is a {error.kind}. "
            f"{error.advice}"
        ) from None
