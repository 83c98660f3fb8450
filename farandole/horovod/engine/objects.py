"""What ranks send each other for an object: the object, or why there is none.

A value that cannot be sent travels as a refusal instead, so that the ranks that wait for it learn
why, and raise too.
"""

from __future__ import annotations

from typing import Any

from farandole.errors import DamagedError, UserError
from farandole.horovod.common.exceptions import HorovodInternalError
from farandole.serialization import objects

_REFUSAL = b"FdNo"  # where the bytes of an object have another magic


def dump(value: Any) -> bytearray:
    """`value` as bytes. Raises `UserError` that names the place of what cannot be sent."""
    return objects.dump(value)


def dump_refusal(why: str) -> bytearray:
    """Bytes that make `load` raise `UserError`, for those who wait for a value that cannot come."""
    return bytearray().join([_REFUSAL, why.encode()])


def load(data: bytes | bytearray | memoryview) -> Any:
    """What `dump` was given; tensors come back on the CPU.

    Raises `UserError` for a refusal, and for a class that this process has not imported;
    `HorovodInternalError` when the bytes are damaged.
    """
    view = memoryview(data)
    if view[: len(_REFUSAL)] == _REFUSAL:
        raise UserError(bytes(view[len(_REFUSAL) :]).decode(errors="replace"))
    try:
        return objects.load(view)
    except DamagedError as error:
        raise HorovodInternalError(str(error)) from error
