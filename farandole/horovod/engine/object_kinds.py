"""The kinds of values that `objects` sends: how each is taken apart, and put together again.

Every kind is a pair of functions. The first gives two plainer values: what is to be known of the
value (a tensor's dtype and shape, a deque's length), and what is in it. The second takes both.

Classes of the user's are named, not sent. They are looked up among the modules that the receiver
has imported already: nothing is imported or run because a message says so.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum, EnumMeta, Flag
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from farandole.errors import UserError
from farandole.horovod.engine.sparse_tensors import checked_sparse


class CannotTravel(Exception):  # noqa: N818  (a reason on its way to a UserError, not an error)
    """Why a value of a kind that we know cannot be sent, and what to send instead."""


class Kind(NamedTuple):
    """See above. `apart` raises `CannotTravel`, `together` anything when the parts do not fit."""

    apart: Callable[[Any], tuple[Any, Any]]
    together: Callable[[Any, Any], Any]


def kind_of(value: Any) -> tuple[str, Kind] | None:
    """The kind of `value` and its name; None for values of no kind."""
    cls = type(value)
    if cls in _EXACTLY:
        return cls.__name__, _EXACTLY[cls]
    name = _family(value)
    return None if name is None else (name, _FAMILIES[name])


def named(name: str) -> Kind:
    """The kind that `kind_of` gave this name. Raises `KeyError`."""
    return _NAMED[name]


def _family(value: Any) -> str | None:
    if isinstance(value, np.generic):
        return "numpy scalar"
    if isinstance(value, Enum):
        return "enum"
    if _is_namedtuple(type(value)):
        return "namedtuple"
    if _is_dataclass(type(value)):
        return "dataclass"
    return None


def _content(apart: Callable[[Any], Any], together: Callable[[Any], Any]) -> Kind:
    """A kind of which nothing is to be known but what is in it."""
    return Kind(lambda value: (None, apart(value)), lambda _, inside: together(inside))


def _attributes(make: Callable[[], Any]) -> Kind:
    def together(inside: dict[str, Any]) -> Any:
        new = make()
        vars(new).update(inside)
        return new

    return _content(lambda value: dict(vars(value)), together)


# Tensors and arrays

_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}


def _tensor_apart(tensor: torch.Tensor) -> tuple[Any, Any]:
    if tensor.is_quantized or tensor.is_nested or str(tensor.dtype) not in _DTYPES:
        raise CannotTravel("Send its numbers as an ordinary tensor.")
    if tensor.is_meta:
        raise CannotTravel("It has no numbers; send its shape and dtype.")
    plain = tensor.detach().cpu()
    if tensor.layout is torch.sparse_coo:
        # Not `indices()`: that is for coalesced tensors only.
        parts = [plain._indices(), plain._values()]
        return ("sparse", tensor.requires_grad, tuple(tensor.shape), tensor.is_coalesced()), parts
    if tensor.layout is not torch.strided:
        raise CannotTravel("Send tensor.to_dense() or tensor.to_sparse_coo().")
    row = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    how = ("dense", tensor.requires_grad, tuple(tensor.shape), tensor.dtype)
    return how, row.view(torch.uint8).numpy().tobytes()


def _tensor_together(how: Any, inside: Any) -> torch.Tensor:
    layout, differentiable, shape, detail = how
    if layout == "sparse":
        indices, values = inside
        tensor = checked_sparse(indices, values, shape, is_coalesced=detail)
    else:
        _check_bytes(inside, shape, detail.itemsize)
        row = torch.empty(len(inside), dtype=torch.uint8)
        if inside:
            # A copy, so that the numbers are aligned and can be written to.
            row = torch.frombuffer(bytearray(inside), dtype=torch.uint8)
        if detail is torch.bool and (row > 1).any():
            raise ValueError("a truth value is neither 0 nor 1")
        tensor = row.view(detail).reshape(shape)
    return tensor.requires_grad_(differentiable)


def _parameter_apart(parameter: nn.Parameter) -> tuple[Any, Any]:
    return parameter.requires_grad, parameter.detach()


def _parameter_together(differentiable: bool, tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=differentiable)


def _array_apart(array: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    if array.dtype.kind not in "biufcSUmM":
        raise CannotTravel("Send array.tolist(), or an array for each field.")
    return (array.dtype.str, array.shape), array.tobytes()


def _array_together(how: Any, inside: Any) -> Any:
    text, shape = how
    dtype = np.dtype(text)
    if dtype.kind not in "biufcSUmM":  # the bytes of others could be taken for addresses
        raise ValueError(f"{text} is no dtype of numbers or text")
    _check_bytes(inside, shape, dtype.itemsize)
    if not inside:
        return np.empty(shape, dtype)
    return np.frombuffer(bytearray(inside), dtype).reshape(shape)


def _check_bytes(inside: Any, shape: tuple[int, ...], itemsize: int) -> None:
    if min(shape, default=0) < 0 or len(inside) != math.prod(shape) * itemsize:
        raise ValueError(f"{len(inside)} bytes are not {tuple(shape)} of {itemsize} bytes each")


# Classes of the user's


def _find(module: str, qualname: str) -> Any:
    """The class of this name in a module that is imported already; None when there is none.

    Looks into dictionaries only: asking a module for an attribute may import another one.
    """
    place: Any = sys.modules.get(module)
    for name in qualname.split("."):
        place = getattr(place, "__dict__", {}).get(name)
    return place


def _address(cls: type) -> tuple[str, str]:
    if _find(cls.__module__, cls.__qualname__) is not cls:
        raise CannotTravel("Define its class at the top of a module, where all ranks can find it.")
    return cls.__module__, cls.__qualname__


def _class_at(address: tuple[str, str], is_kind: Callable[[Any], bool], kind: str) -> Any:
    found = _find(*address)
    if not is_kind(found):
        module, name = address
        raise UserError(
            f"the object has a {kind} of class {name} of module {module!r}, which is not there on "
            f"this rank. Write `import {module}` on every rank before you send it."
        )
    return found


def _is_enum(cls: Any) -> bool:
    return isinstance(cls, EnumMeta)


def _is_namedtuple(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")


def _is_dataclass(cls: Any) -> bool:
    """Of its own, not one that is a dictionary or an exception too: that part would be lost."""
    return isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__


def _enum_together(address: Any, inside: Any) -> Any:
    cls = _class_at(address, _is_enum, "value")
    return cls(inside) if issubclass(cls, Flag) else cls.__members__[inside]


def _enum_apart(value: Enum) -> tuple[Any, Any]:
    # Flags that are set together have no name of their own.
    return _address(type(value)), value.value if isinstance(value, Flag) else value.name


def _namedtuple_together(address: Any, inside: Any) -> Any:
    cls = _class_at(address, _is_namedtuple, "namedtuple")
    if len(inside) != len(cls._fields):
        raise ValueError(f"{cls.__name__} has {len(cls._fields)} fields, not {len(inside)}")
    return tuple.__new__(cls, inside)


def _dataclass_apart(value: Any) -> tuple[Any, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    inside = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return _address(type(value)), inside | getattr(value, "__dict__", {})


def _dataclass_together(address: Any, inside: dict[str, Any]) -> Any:
    """As it was, without `__init__` and `__post_init__`: what they did is in the attributes."""
    cls = _class_at(address, _is_dataclass, "dataclass")
    new = object.__new__(cls)
    for name, value in inside.items():
        if name.startswith("__"):
            raise ValueError(f"{name} is no attribute that is sent")
        object.__setattr__(new, name, value)  # also when it is frozen
    return new


# Containers and the like

_FACTORIES: Mapping[str, type] = {
    cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)
}


def _defaultdict_apart(value: defaultdict[Any, Any]) -> tuple[Any, Any]:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise CannotTravel(f"Its factory is none of {', '.join(_FACTORIES)}; send dict(…) of it.")
    return None if factory is None else getattr(factory, "__name__", None), dict(value)


def _defaultdict_together(factory: str | None, inside: dict[Any, Any]) -> Any:
    return defaultdict(None if factory is None else _FACTORIES[factory], inside)


def _ordered_together(attributes: dict[str, Any], inside: dict[Any, Any]) -> Any:
    """With its attributes: a model's state dict keeps the versions of its layers there."""
    new = OrderedDict(inside)
    vars(new).update(attributes)
    return new


def _datetime_apart(value: dt.datetime) -> tuple[Any, Any]:
    return (*value.timetuple()[:6], value.microsecond, value.fold), value.tzinfo


def _time_apart(value: dt.time) -> tuple[Any, Any]:
    return (value.hour, value.minute, value.second, value.microsecond, value.fold), value.tzinfo


_EXACTLY: Mapping[type, Kind] = {
    complex: _content(lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    # A view of the bytes first: of a number, bytearray would make as many zeros.
    bytearray: _content(bytes, lambda inside: bytearray(memoryview(inside))),
    set: _content(list, set),
    frozenset: _content(list, frozenset),
    range: _content(lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    slice: _content(lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    OrderedDict: Kind(lambda value: (dict(vars(value)), dict(value)), _ordered_together),
    defaultdict: Kind(_defaultdict_apart, _defaultdict_together),
    Counter: _content(dict, Counter),
    deque: Kind(lambda value: (value.maxlen, list(value)), lambda n, inside: deque(inside, n)),
    Namespace: _attributes(Namespace),
    SimpleNamespace: _attributes(SimpleNamespace),
    type(Path()): _content(str, Path),
    PurePosixPath: _content(str, PurePosixPath),
    PureWindowsPath: _content(str, PureWindowsPath),
    dt.datetime: Kind(
        _datetime_apart, lambda at, zone: dt.datetime(*at[:7]).replace(tzinfo=zone, fold=at[7])
    ),
    dt.time: Kind(_time_apart, lambda at, zone: dt.time(*at[:4]).replace(tzinfo=zone, fold=at[4])),
    dt.date: _content(lambda d: [d.year, d.month, d.day], lambda parts: dt.date(*parts)),
    dt.timedelta: _content(
        lambda d: [d.days, d.seconds, d.microseconds], lambda parts: dt.timedelta(*parts)
    ),
    dt.timezone: _content(
        lambda zone: list(zone.__getinitargs__()), lambda parts: dt.timezone(*parts)
    ),
    torch.Size: _content(list, torch.Size),
    torch.dtype: _content(str, lambda name: _DTYPES[name]),
    torch.device: _content(str, torch.device),
    torch.Tensor: Kind(_tensor_apart, _tensor_together),
    nn.Parameter: Kind(_parameter_apart, _parameter_together),
    np.ndarray: Kind(_array_apart, _array_together),
}

_FAMILIES: Mapping[str, Kind] = {
    "numpy scalar": Kind(
        lambda value: _array_apart(np.asarray(value)),
        lambda how, inside: _array_together(how, inside)[()],
    ),
    "enum": Kind(_enum_apart, _enum_together),
    "namedtuple": Kind(lambda value: (_address(type(value)), list(value)), _namedtuple_together),
    "dataclass": Kind(_dataclass_apart, _dataclass_together),
}

_NAMED: Mapping[str, Kind] = {
    **{cls.__name__: kind for cls, kind in _EXACTLY.items()},
    **_FAMILIES,
}
