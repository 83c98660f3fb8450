"""Things that are found by name, such as strategies and schedules: listed once, found everywhere.

What lists or checks names reads a registry. So a new strategy or schedule is made known in one
place, and the command line, the text forms, the checkers and the conformance suites know it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from farandole.errors import UserError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """By name, in the order of registration.

    `homes` are those that come with Farandole, as `module:attribute`. They are imported when they
    are first used: the names alone cost nothing, and help texts need not wait for torch.
    """

    def __init__(self, what: str, homes: Mapping[str, str] | None = None) -> None:
        self._what = what
        self._homes = dict(homes or {})
        self._found: dict[str, T] = {}

    def register(self, name: str, value: T) -> T:
        """Makes it known. Raises `UserError` for a name that is taken by another."""
        if name in self and self[name] is not value:
            raise UserError(f"there is already a {self._what} {name!r}. Take another name.")
        self._homes.setdefault(name, "")
        self._found[name] = value
        return value

    def remove(self, name: str) -> None:
        """For tests: it was never registered."""
        del self._homes[name]
        self._found.pop(name, None)

    def __getitem__(self, name: str) -> T:
        if name not in self._found:
            module, _, attribute = self._homes[name].partition(":")
            self._found[name] = getattr(importlib.import_module(module), attribute)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def home_of(self, attribute: str) -> T | None:
        """The one whose Python name this is, if it comes with Farandole."""
        for name, home in self._homes.items():
            if home.endswith(f":{attribute}"):
                return self[name]
        return None
