"""What servers and clients may say to the registrar: checked whole, before anything is done.

Each message is a JSON object whose first word names it:

    hello      "server": address, mark · "worker": rank, late, job, of · "guest"
    facts      an object: what a server says of itself; also a sign of life
    reshaped   [range, epoch]                 a head has moved a range as ordered
    confirmed  question; held: [[range, epoch], …]    which whole copies a server holds
    meet, missing, mark   a name             of workers
    enter, bye
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from farandole.server.protocol.payload import Malformed

MAX_WORKERS = 1 << 16
_MAX_TEXT = 1000
_MAX_RANGES = 1 << 16
_ADDRESS = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")
_WORKERS = ("worker", "late")


def kind_of(message: Mapping[str, Any]) -> str:
    """Which message this is. Raises `Malformed` if it is none, or not what such a one contains."""
    kind = next((kind for kind in _CHECKS if kind in message), None)
    if kind is None:
        raise Malformed(f"it is none of {', '.join(_CHECKS)}")
    if not _CHECKS[kind](message):
        raise Malformed(f"{kind!r} does not have what belongs to it, or something else")
    return kind


def check_sender(kind: str, role: str) -> None:
    """Raises `Malformed` for what this one does not say."""
    roles = _ROLES.get(kind)
    if roles is not None and role not in roles:
        raise Malformed(f"a {role} does not say {kind!r}")


def _is_count(value: object, limit: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_hello(message: Mapping[str, Any]) -> bool:
    role = message["hello"]
    if role == "server":
        address = message.get("address")
        is_address = _is_text(address) and _ADDRESS.fullmatch(str(address)) is not None
        return is_address and _is_text(message.get("mark", ""))
    if role == "worker":
        return (
            _is_count(message.get("rank"), MAX_WORKERS)
            and isinstance(message.get("late", False), bool)
            and _is_text(message.get("job", ""))
            and _is_count(message.get("of", 0), MAX_WORKERS + 1)
        )
    return bool(role == "guest")


def _is_pair(value: object) -> bool:
    """A range and its epoch."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_count(value[0], _MAX_RANGES)
        and _is_count(value[1])
    )


def _is_confirmation(message: Mapping[str, Any]) -> bool:
    held = message.get("held")
    return (
        _is_count(message["confirmed"])
        and isinstance(held, list)
        and len(held) <= _MAX_RANGES
        and all(_is_pair(pair) for pair in held)
    )


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "hello": _is_hello,
        "facts": lambda message: isinstance(message["facts"], dict),
        "confirmed": _is_confirmation,
        "reshaped": lambda message: _is_pair(message["reshaped"]),
        "meet": lambda message: _is_text(message["meet"]),
        "missing": lambda message: _is_text(message["missing"]),
        "mark": lambda message: _is_text(message["mark"]),
        "enter": lambda message: message["enter"] is True,
        "bye": lambda message: message["bye"] is True,
    }
)
_ROLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "confirmed": ("server",),
        "reshaped": ("server",),
        "meet": _WORKERS,
        "missing": _WORKERS,
        "mark": _WORKERS,
        "enter": _WORKERS,
    }
)
