"""Values of classes that the user has defined: enums, named tuples and dataclasses.

Classes are named, not sent. They are looked up among the modules that the receiver has imported
already: nothing is imported or run because a message says so.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import Enum, EnumMeta, Flag
from typing import Any

from farandole.errors import UserError
from farandole.serialization.kind import CannotSerialize, Kind


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
        raise CannotSerialize(
            "Define its class at the top of a module, where all ranks can find it."
        )
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


def is_namedtuple(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_dataclass(cls: Any) -> bool:
    """Of its own, not one that is a dictionary or an exception too: that part would be lost."""
    return isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__


def _enum_together(address: Any, content: Any) -> Any:
    cls = _class_at(address, _is_enum, "value")
    return cls(content) if issubclass(cls, Flag) else cls.__members__[content]


def _enum_apart(value: Enum) -> tuple[Any, Any]:
    # Flags that are set together have no name of their own.
    return _address(type(value)), value.value if isinstance(value, Flag) else value.name


def _namedtuple_together(address: Any, content: Any) -> Any:
    cls = _class_at(address, is_namedtuple, "namedtuple")
    if len(content) != len(cls._fields):
        raise ValueError(f"{cls.__name__} has {len(cls._fields)} fields, not {len(content)}")
    return tuple.__new__(cls, content)


def _dataclass_apart(value: Any) -> tuple[Any, Any]:
    names = [field.name for field in dataclasses.fields(value)]
    content = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return _address(type(value)), content | getattr(value, "__dict__", {})


def _dataclass_together(address: Any, content: dict[str, Any]) -> Any:
    """As it was, without `__init__` and `__post_init__`: what they did is in the attributes."""
    cls = _class_at(address, is_dataclass, "dataclass")
    new = object.__new__(cls)
    for name, value in content.items():
        if name.startswith("__"):
            raise ValueError(f"{name} is no attribute that is sent")
        object.__setattr__(new, name, value)  # also when it is frozen
    return new


ENUM = Kind(_enum_apart, _enum_together)
NAMED_TUPLE = Kind(lambda value: (_address(type(value)), list(value)), _namedtuple_together)
DATACLASS = Kind(_dataclass_apart, _dataclass_together)
