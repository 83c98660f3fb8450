"""The extended kinds of values: what `objects` can send besides numbers, strings and tensors."""

from __future__ import annotations

import datetime as dt
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from farandole.errors import NotSerializableError
from farandole.serialization.class_kinds import (
    DATACLASS,
    ENUM,
    NAMED_TUPLE,
    is_dataclass,
    is_namedtuple,
)
from farandole.serialization.kind import CannotSerialize, Kind, content_only
from farandole.serialization.tensor_kinds import NUMPY_SCALAR, TENSOR_KINDS, is_leaf
from farandole.serialization.trees import Parts


class ExtendedKinds:
    """For `trees.pack`."""

    def is_leaf(self, tensor: torch.Tensor) -> bool:
        return is_leaf(tensor)

    def take_apart(self, value: Any, place: str) -> Parts:
        name = _name(value)
        try:
            if name is None:
                raise CannotSerialize(_advice(value))
            return Parts(name, *_KINDS[name].apart(value))
        except CannotSerialize as advice:
            raise NotSerializableError(place, _description(value), str(advice)) from None

    def put_together(self, parts: Parts) -> Any:
        return _KINDS[parts.kind].together(parts.detail, parts.content)


def _name(value: Any) -> str | None:
    """The name of the kind; None for values of no kind."""
    cls = type(value)
    if cls in _EXACT_TYPES:
        return cls.__name__
    if isinstance(value, np.generic):
        return "numpy scalar"
    if isinstance(value, Enum):
        return "enum"
    if is_namedtuple(cls):
        return "namedtuple"
    return "dataclass" if is_dataclass(cls) else None


def _description(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} of {value.dtype} ({value.layout})"
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _advice(value: Any) -> str:
    """What to send in place of a value of no kind."""
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        return "Send its state_dict()."
    if isinstance(value, type) or callable(value):
        return "Code is not sent; send its name, and look it up there."
    if isinstance(value, Mapping):
        return "Send dict(…) of it."
    if hasattr(value, "__iter__"):
        return "Send list(…) of it."
    return (
        "Send numbers, strings, tensors, and lists and dicts of these, or make its class a "
        "dataclass."
    )


def _attributes(make: Callable[[], Any]) -> Kind:
    def together(content: dict[str, Any]) -> Any:
        new = make()
        vars(new).update(content)
        return new

    return content_only(lambda value: dict(vars(value)), together)


_FACTORIES: Mapping[str, type] = {
    cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)
}


def _defaultdict_apart(value: defaultdict[Any, Any]) -> tuple[Any, Any]:
    factory = value.default_factory
    if factory is not None and factory not in _FACTORIES.values():
        raise CannotSerialize(
            f"Its factory is none of {', '.join(_FACTORIES)}; send dict(…) of it."
        )
    return None if factory is None else getattr(factory, "__name__", None), dict(value)


def _defaultdict_together(factory: str | None, content: dict[Any, Any]) -> Any:
    return defaultdict(None if factory is None else _FACTORIES[factory], content)


def _ordered_together(attributes: dict[str, Any], content: dict[Any, Any]) -> Any:
    """With its attributes: a model's state dict keeps the versions of its layers there."""
    new = OrderedDict(content)
    vars(new).update(attributes)
    return new


def _datetime_apart(value: dt.datetime) -> tuple[Any, Any]:
    return (*value.timetuple()[:6], value.microsecond, value.fold), value.tzinfo


def _time_apart(value: dt.time) -> tuple[Any, Any]:
    return (value.hour, value.minute, value.second, value.microsecond, value.fold), value.tzinfo


_EXACT_TYPES: Mapping[type, Kind] = {
    # Plain types, where JSON cannot hold the value: a very large number, half a character.
    int: content_only(hex, lambda text: int(text, 16)),
    str: content_only(lambda text: list(map(ord, text)), lambda codes: "".join(map(chr, codes))),
    **TENSOR_KINDS,
    complex: content_only(lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    set: content_only(list, set),
    frozenset: content_only(list, frozenset),
    range: content_only(lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
    slice: content_only(lambda s: [s.start, s.stop, s.step], lambda parts: slice(*parts)),
    OrderedDict: Kind(lambda value: (dict(vars(value)), dict(value)), _ordered_together),
    defaultdict: Kind(_defaultdict_apart, _defaultdict_together),
    Counter: content_only(dict, Counter),
    deque: Kind(lambda value: (value.maxlen, list(value)), lambda n, content: deque(content, n)),
    Namespace: _attributes(Namespace),
    SimpleNamespace: _attributes(SimpleNamespace),
    type(Path()): content_only(str, Path),
    PurePosixPath: content_only(str, PurePosixPath),
    PureWindowsPath: content_only(str, PureWindowsPath),
    dt.datetime: Kind(
        _datetime_apart, lambda at, zone: dt.datetime(*at[:7]).replace(tzinfo=zone, fold=at[7])
    ),
    dt.time: Kind(_time_apart, lambda at, zone: dt.time(*at[:4]).replace(tzinfo=zone, fold=at[4])),
    dt.date: content_only(lambda d: [d.year, d.month, d.day], lambda parts: dt.date(*parts)),
    dt.timedelta: content_only(
        lambda d: [d.days, d.seconds, d.microseconds], lambda parts: dt.timedelta(*parts)
    ),
    dt.timezone: content_only(
        lambda zone: list(zone.__getinitargs__()), lambda parts: dt.timezone(*parts)
    ),
}

_KINDS: Mapping[str, Kind] = {
    **{cls.__name__: kind for cls, kind in _EXACT_TYPES.items()},
    "numpy scalar": NUMPY_SCALAR,
    "enum": ENUM,
    "namedtuple": NAMED_TUPLE,
    "dataclass": DATACLASS,
}
