"""Slurm's short forms: lists of nodes, such as `node[03-05,9],login`, and counts of tasks on them.

Both sides read them: a worker that `srun` has started, and a launcher inside of an allocation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from farandole.errors import UserError

_MOST_NODES = 100_000  # more than any cluster has; `n[0-999999999]` must not fill the memory
_NODE = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")  # up to a comma that is outside of brackets
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def expand_nodes(text: str) -> list[str]:
    """`node[03-05,9],login` is node03, node04, node05, node9 and login.

    Several brackets in one name are multiplied, the last one fastest, as Slurm has it. Raises
    `UserError` for a text that is no such list.
    """
    parts = _NODE.findall(text)
    if ",".join(parts) != text:
        raise _unreadable(text)
    found = [name for part in parts for name in _names(part, text)]
    if len(found) > _MOST_NODES:
        raise _unreadable(text)
    return found


def _names(part: str, text: str) -> Iterator[str]:
    choices = [
        [literal] if literal else _numbers(inside, text)
        for inside, literal in (found.groups() for found in _PIECE.finditer(part))
    ]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > _MOST_NODES:
        raise _unreadable(text)
    return ("".join(each) for each in itertools.product(*choices))


def _numbers(inside: str, text: str) -> list[str]:
    """`03-05,9` is 03, 04, 05, 9: as wide as the first number of each range is written."""
    numbers: list[str] = []
    for piece in inside.split(","):
        found = _RANGE.fullmatch(piece)
        if found is None:
            raise _unreadable(text)
        first, last = found[1], found[2] or found[1]
        span = range(int(first), int(last) + 1)
        if not 0 < len(span) <= _MOST_NODES:
            raise _unreadable(text)
        numbers += [f"{number:0{len(first)}}" for number in span]
    return numbers


def _unreadable(text: str) -> UserError:
    shown = text if len(text) <= 200 else f"{text[:200]}…"
    return UserError(
        f"{shown!r} is no list of nodes as Slurm writes it, such as node[03-05,9],login. Name the "
        "hosts yourself: -H node03:4,node04:4"
    )


def tasks_per_node(text: str) -> list[int]:
    """Slurm's `2(x3),1` is [2, 2, 2, 1]."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
