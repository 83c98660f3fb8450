"""What travels in a message: a tensor, or any nest of tuples, lists and dicts of tensors and plain
values. It goes as a description, once, and the tensors' bytes.

    describe  [float32 (8, 128) differentiable, int64 (8,) not] in a tuple of two
    bytes     of the first, of the second

Messages of one kind are described alike, so a link sends each description once and then its number.
Nothing is unpickled: a description is JSON, and names only containers that torch itself knows.

`farandole.serialization` is not used here. It writes whole values, with their numbers, for files
that other versions read. A message needs the opposite: a description that can be hashed, so that it
travels once, and tensors whose memory goes out as it is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from farandole.errors import UserError

_PLAIN = (bool, int, float, str, type(None))
_SIMPLE = {torch.Tensor, bool, int, str, type(None)}
"""Leaves of which equal ones are alike, as 0.0 and -0.0 are not."""
_ROWS = {tuple, list}


class Slot(NamedTuple):
    """A tensor of a payload, without its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool


class Plain(NamedTuple):
    """A value that is no tensor. With its kind, because True and 1 are equal, as 0.0 and -0.0."""

    kind: str
    value: Any

    @classmethod
    def of(cls, value: Any) -> Plain:
        return cls(value.hex() if isinstance(value, float) else type(value).__name__, value)


class Description:
    """A payload without the tensors' numbers. It can be compared, hashed and sent as text."""

    def __init__(self, spec: pytree.TreeSpec, leaves: tuple[Slot | Plain, ...]) -> None:
        self.spec = spec
        self.leaves = leaves
        self.slots = [leaf for leaf in leaves if isinstance(leaf, Slot)]
        # Asked for with every message, and to find them takes longer than all the rest.
        self._hash = hash((spec, leaves))
        self._is_tensor = spec.is_leaf() and bool(self.slots)
        is_row = spec.type in _ROWS and spec.num_nodes == 1 + len(leaves)
        self._row: type | None = spec.type if is_row else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Description):
            return NotImplemented
        return self.leaves == other.leaves and self.spec == other.spec

    def __hash__(self) -> int:
        return self._hash

    def text(self) -> bytes:
        leaves = [
            {"dtype": str(leaf.dtype), "shape": leaf.shape, "differentiable": leaf.differentiable}
            if isinstance(leaf, Slot)
            else leaf.value
            for leaf in self.leaves
        ]
        try:
            return json.dumps([pytree.treespec_dumps(self.spec), leaves]).encode()
        except (NotImplementedError, TypeError) as error:
            raise UserError(f"this cannot travel between stages: {error}") from error

    @classmethod
    def read(cls, text: bytes) -> Description:
        spec, leaves = json.loads(text)
        return cls(pytree.treespec_loads(spec), tuple(_read_leaf(leaf) for leaf in leaves))

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value itself, from tensors of these kinds."""
        if self._is_tensor:
            return tensors[0]
        coming = iter(tensors)
        leaves = [next(coming) if isinstance(leaf, Slot) else leaf.value for leaf in self.leaves]
        if self._row is not None:
            return self._row(leaves)
        return pytree.tree_unflatten(leaves, self.spec)


def _read_leaf(leaf: Any) -> Slot | Plain:
    if not isinstance(leaf, dict):
        return Plain.of(leaf)
    dtype = getattr(torch, leaf["dtype"].removeprefix("torch."))
    return Slot(dtype, tuple(leaf["shape"]), leaf["differentiable"])


def describe(value: Any) -> tuple[Description, list[torch.Tensor]]:
    """A value as description and tensors. Raises `UserError` for what cannot travel."""
    # Nearly every message is a tensor or a row of them. To take such a one apart as a tree takes
    # longer than to send it.
    kind = type(value)
    leaves = value if kind in _ROWS else (value,)
    if all(type(leaf) in _SIMPLE for leaf in leaves):
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        row: Any = kind if kind in _ROWS else None
        return _described(row, tuple(map(_leaf, leaves))), tensors
    leaves, spec = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return Description(spec, tuple(map(_leaf, leaves))), tensors


@functools.lru_cache(maxsize=1024)
def _described(row: type | None, leaves: tuple[Slot | Plain, ...]) -> Description:
    """Of a single leaf, or of a row of them."""
    spec = pytree.tree_structure(0 if row is None else row([0] * len(leaves)))
    return Description(spec, leaves)


def _leaf(leaf: Any) -> Slot | Plain:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized:
            raise UserError(f"a {leaf.layout} tensor cannot travel between stages; make it dense.")
        return Slot(leaf.dtype, tuple(leaf.shape), leaf.requires_grad)
    if isinstance(leaf, _PLAIN):
        return Plain.of(leaf)
    raise UserError(
        f"values of type {type(leaf).__name__} cannot travel between stages. Tensors, numbers and "
        "strings can, in tuples, lists and dicts."
    )
