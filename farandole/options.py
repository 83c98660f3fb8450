"""The text form of a frozen dataclass: `key=value,flag,size=2x2` and back.

Strategies and layouts are frozen dataclasses, and a script and a command line must be able to say
the same thing. This is the one place that reads and writes that text.

A field that holds something with a text form of its own, such as a codec, names the function that
reads it: `field(default=None, metadata={"parse": parse})`. It is written by `str`, without commas.
"""

from __future__ import annotations

import dataclasses
import shlex
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from farandole.errors import UserError, nearest

T = TypeVar("T")


def parse_named(kinds: Mapping[str, type[T]], text: str, *, what: str) -> T:
    """Build the one of `kinds` that `name` or `name:key=value/…` describes. (Commas do as well.)

    Options are parted by `/`, so that the text can stand among options parted by `,`. Raises
    `UserError` with the nearest name. `what` is what all of them are, such as "codec".
    """
    name, _, options = text.strip().partition(":")
    if name not in kinds:
        raise UserError(f"there is no {what} {name!r}. {nearest(name, kinds)}")
    return parse_options(kinds[name], options.replace("/", ","), what=f"{what} {name!r}")


def parse_options(cls: type[T], text: str, *, what: str) -> T:
    """Build `cls` from `text`; a key without `=` is a boolean set to true.

    Raises `UserError` naming the key, the value and the nearest known key. `what` names the thing
    being parsed in those messages, such as "strategy 'local'".
    """
    kinds = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = {field.name: kinds[field.name] for field in fields}
    parsers = {field.name: field.metadata.get("parse") for field in fields}
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, raw = item.partition("=")
        key = key.strip()
        if key not in known:
            raise UserError(f"{what} has no option {key!r}. {nearest(key, known)}")
        if key in values:
            raise UserError(f"{what}: option {key!r} is given twice in {text!r}. Keep one.")
        if not equals and known[key] is not bool:
            raise UserError(f"{what}: option {key!r} needs a value, such as {key}=…")
        raw = raw.strip() if equals else "true"
        parse = parsers[key] if raw.lower() != "none" else None
        values[key] = parse(raw) if parse else _read(known[key], raw, f"{what}: {key}")
    return cls(**values)


def format_options(value: object) -> str:
    """The options of `value` that differ from their defaults, as `parse_options` reads them."""
    parts = []
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        current = getattr(value, field.name)
        if current == field.default:
            continue
        parts.append(field.name if current is True else f"{field.name}={_write(current)}")
    return ",".join(parts)


def require_choices(value: object, what: str) -> None:
    """Raises `UserError` for a field that is one of a few words, and holds another."""
    for option, kind in typing.get_type_hints(type(value)).items():
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        if choices and getattr(value, option) not in choices:
            chosen = getattr(value, option)
            raise UserError(
                f"{what}: {option}={chosen!r} is not a choice. {nearest(str(chosen), choices)}"
            )


def _write(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if type(value) is tuple:  # one of a kind of its own has a text of its own
        return "x".join(_write(item) for item in value)
    return str(value)


def _read(kind: Any, raw: str, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        if raw.lower() == "none":
            return None
        return _read(next(k for k in typing.get_args(kind) if k is not type(None)), raw, where)
    if origin is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(kind)]
        if raw not in choices:
            raise UserError(f"{where}={raw!r} is not a choice. {nearest(raw, choices)}")
        return typing.get_args(kind)[choices.index(raw)]
    if origin is tuple:
        kinds, parts = typing.get_args(kind), raw.split("x")
        if Ellipsis not in kinds and len(parts) != len(kinds):
            example = "x".join("2" * len(kinds))
            raise UserError(f"{where}={raw!r} is not {len(kinds)} values, such as {example}.")
        return tuple(_read(kinds[0], part, where) for part in parts)
    if kind is bool:
        if raw.lower() not in _BOOLS:
            raise UserError(f"{where}={raw!r} is not yes or no. Write true or false.")
        return _BOOLS[raw.lower()]
    if kind in (int, float):
        name = "a whole number" if kind is int else "a number"
        try:
            value = kind(raw)
        except ValueError:
            raise UserError(f"{where}={raw!r} is not {name}.") from None
        if value != value:  # nan compares false with every bound that a strategy checks
            raise UserError(f"{where}={raw!r} is not {name}.")
        return value
    return raw


_BOOLS: typing.Final = types.MappingProxyType(
    {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
)


def read_chosen(text: str) -> dict[str, str]:
    """Values for `run.choose`: `lr=0.01 width=64`, as words of a shell. Raises `UserError`."""
    chosen: dict[str, str] = {}
    for word in shlex.split(text):
        name, sign, value = word.partition("=")
        if not name or not sign:
            raise UserError(f"--choose {word}: write NAME=VALUE, such as lr=0.01.")
        if name in chosen:
            raise UserError(
                f"--choose {word}: {name} is given twice, and was {chosen[name]} before."
            )
        chosen[name] = value
    return chosen
