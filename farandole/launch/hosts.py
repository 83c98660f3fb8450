"""On which hosts a job runs, as `host:slots` lists and host files say it, and who sits where."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from farandole.errors import UserError
from farandole.topology import Host, Topology
from farandole.worker.network import is_here

HERE = "localhost"

# A name or an IPv4 address. It becomes a word for ssh, and must not look like an option there.
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)
_ENTRY = re.compile(rf"(?P<host>{_NAME.pattern})(?:(?::|\s+slots\s*=\s*)(?P<slots>\d+))?", re.ASCII)


def parse_hosts(text: str, option: str = "--hosts", *, once: bool = False) -> dict[str, int]:
    """`a:2,b:4` as slots by host, in order; a host without a number has one slot.

    The slots of a host that is listed again are added up, as Horovod does, or with `once` it is
    refused.
    """
    return _add_up((_entry(part.strip(), option) for part in text.split(",")), option, once)


def read_hostfile(path: Path, *, once: bool = False) -> dict[str, int]:
    """A host a line: `a slots=2`, `a:2` or `a`; what follows # is a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the host file {path} cannot be read: {error}.") from error
    entries = []
    for number, line in enumerate(lines, start=1):
        said = line.partition("#")[0].strip()
        if said:
            entries.append(_entry(said, f"{path}, line {number}"))
    return _add_up(entries, str(path), once)


def parse_host_line(line: str, slots: int, where: str) -> tuple[str, int]:
    """What a discovery script prints for a host; `slots` where it says only the name."""
    host, said = _entry(line, where)
    return host, slots if said is None else said


def _entry(text: str, where: str) -> tuple[str, int | None]:
    found = _ENTRY.fullmatch(text)
    if found is None or (found["slots"] and not int(found["slots"])):
        raise UserError(
            f"{where}: {text!r} is no host with slots for workers. Write host:2, or in a file "
            "`host slots=2`; the host is a name or an IPv4 address."
        )
    return found["host"], int(found["slots"]) if found["slots"] else None


def check_host_name(name: str, where: str) -> str:
    """Raises `UserError` for what is no name of a host; it becomes a word for ssh."""
    if _NAME.fullmatch(name) is None:
        raise UserError(f"{where}: {name!r} is no name. Write letters, digits, '.', '-' and '_'.")
    return name


def _add_up(entries: Iterable[tuple[str, int | None]], where: str, once: bool) -> dict[str, int]:
    slots: dict[str, int] = {}
    for host, count in entries:
        if once and host in slots:
            raise UserError(
                f"{where} lists host {host} twice. List it once, with all its slots: "
                f"{host}:{slots[host] + (count or 1)}"
            )
        slots[host] = slots.get(host, 0) + (count or 1)
    if not slots:
        raise UserError(f"{where} names no host. Write host:2, say.")
    return slots


def gathered(hosts: Mapping[str, int]) -> dict[str, int]:
    """With all names and addresses of this host as one, `localhost`: it is one host."""
    slots: dict[str, int] = {}
    for host, count in hosts.items():
        name = HERE if is_here(host) else host
        slots[name] = slots.get(name, 0) + count
    return slots


def place_workers(hosts: Mapping[str, int], workers: int) -> Topology:
    """`workers` ranks on these hosts, filling one after the other.

    Raises `UserError` when there are too few slots.
    """
    there = sum(hosts.values())
    if not 1 <= workers <= there:
        listed = ", ".join(f"{host}:{slots}" for host, slots in hosts.items())
        raise UserError(
            f"{workers} workers on {there} slots ({listed}): ask for 1 to {there}, or give the "
            "hosts more slots."
        )
    placed: list[Host] = []
    first = 0
    for host, slots in hosts.items():
        end = min(first + slots, workers)
        if end > first:
            placed.append(Host(host, tuple(range(first, end))))
        first = end
    return Topology(tuple(placed))
