"""Host files: a host per line, or TOML, which also says how each host is reached.

[[host]]
name = "node1"
slots = 4
port = 2222        # of ssh
user = "ann"       # of ssh
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from farandole.errors import UserError, nearest
from farandole.launch.hosts import check_host_name, read_hostfile


@dataclass(frozen=True)
class HostEntry:
    """A host with slots for workers; None: as ssh's own settings have it."""

    name: str
    slots: int = 1
    port: int | None = None
    user: str | None = None


_KEYS = tuple(field.name for field in fields(HostEntry))


def read_host_file(path: Path) -> list[HostEntry]:
    """A file whose name ends in .toml is read as TOML. Raises `UserError` naming the entry."""
    if path.suffix == ".toml":
        return _read_toml(path)
    return [HostEntry(name, slots) for name, slots in read_hostfile(path, once=True).items()]


def _read_toml(path: Path) -> list[HostEntry]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the host file {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is no TOML: {error}.") from error
    for key in content:
        if key != "host":
            raise UserError(f"{path}: there is no key {key!r}. {nearest(key, ['host'])}")
    tables = content.get("host")
    if not isinstance(tables, list) or not tables:
        raise UserError(f'{path} names no host. Write [[host]] and below it name = "node1".')
    entries = [_entry(table, f"{path}, host {at}") for at, table in enumerate(tables, start=1)]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path} lists host {name} twice. List it once, with all its slots.")
    return entries


def _entry(table: object, where: str) -> HostEntry:
    if not isinstance(table, Mapping):
        raise UserError(f"{where}: write [[host]], with two brackets, above each host.")
    for key in table:
        if key not in _KEYS:
            raise UserError(f"{where}: there is no key {key!r}. {nearest(key, _KEYS)}")
    name = table.get("name")
    if not isinstance(name, str):
        raise UserError(f'{where} has no name. Write name = "node1".')
    user = table.get("user")
    if user is not None:
        if not isinstance(user, str):
            raise UserError(f"{where}: user = {user!r} is no name of a user.")
        check_host_name(user, f"{where}: user")
    return HostEntry(
        check_host_name(name, where),
        _number(table, "slots", where, 1, None) or 1,
        _number(table, "port", where, 1, 65535),
        user,
    )


def _number(
    table: Mapping[str, Any], key: str, where: str, least: int, most: int | None
) -> int | None:
    value = table.get(key)
    if value is None:
        return None
    # `isinstance(True, int)` holds, and `slots = true` is no number.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number or value < least or (most is not None and value > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise UserError(f"{where}: {key} = {value!r} must be a whole number, {allowed}.")
    return int(value)
