"""Values of a model's code as they were at one moment, in a form that can be compared."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)


class WrittenTensor(NamedTuple):
    """A tensor, and how often it has been written to."""

    tensor: torch.Tensor
    version: int


class Content(NamedTuple):
    """What a dictionary or list held."""

    container: Any
    copy: Any
    ids: tuple[int, ...]

    def is_the_same(self) -> bool:
        """By identity: plain values cannot change, and what can is looked at by itself."""
        return tuple(map(id, _entries(self.container))) == self.ids


class Change(NamedTuple):
    """A value that is no longer what it was."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        if isinstance(self.before, WrittenTensor) or isinstance(self.now, WrittenTensor):
            return self.name.rpartition(", ")[0]
        if isinstance(self.before, Identity) and isinstance(self.now, Identity):
            return self.name
        return f"{self.name} (from {_said(self.before)} to {_said(self.now)})"


def _entries(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def content_of(container: Any) -> Content:
    copy = dict(container) if isinstance(container, dict) else list(container)
    return Content(container, copy, tuple(map(id, _entries(copy))))


class Identity:
    """Something that is compared by being the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


ABSENT = Identity(object())


def key_of(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else id(value)


def version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def same(one: Any, two: Any) -> bool:
    if isinstance(one, WrittenTensor) or isinstance(two, WrittenTensor):
        return (
            isinstance(one, WrittenTensor)
            and isinstance(two, WrittenTensor)
            and one.tensor is two.tensor
            and one.version == two.version
        )
    return one is two or (type(one) is type(two) and bool(one == two))


def _said(value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, Identity):
        return f"a {type(value.value).__name__}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
