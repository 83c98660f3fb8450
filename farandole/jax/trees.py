"""Trees of arrays: the names of their leaves, and all leaves of a dtype as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from farandole.comm import Group
from farandole.errors import ModelMismatchError, UserError

Leaf = tuple[str, tuple[int, ...], str]
"""The name of a leaf, its shape and its dtype: what must agree between ranks."""


@dataclass(frozen=True)
class Tree:
    """What a tree consists of, without its numbers."""

    structure: Any
    leaves: tuple[Leaf, ...]

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.leaves]

    def rebuild(self, values: Sequence[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self.structure, values)


def taken_apart(tree: Any, what: str) -> tuple[list[Any], Tree]:
    """The arrays of a tree, and its description. Raises `UserError` for what is no array."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    values, leaves = [], []
    for path, given in paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or what
        try:
            value = given if isinstance(given, jax.core.Tracer) else jnp.asarray(given)
        except (TypeError, ValueError) as error:
            raise UserError(f"{what}: {name!r} is no array: {error}") from error
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise UserError(
                f"{what}: {name!r} is a random key, and keys are not sent. Take it out of the tree."
            )
        values.append(value)
        leaves.append((name, tuple(value.shape), str(value.dtype)))
    return values, Tree(structure, tuple(leaves))


def is_traced(values: Sequence[Any]) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def fused(values: Sequence[Any]) -> list[Any]:
    """One vector for each dtype, in the order in which dtypes first come."""
    kinds = dict.fromkeys(value.dtype for value in values)
    return [
        jnp.concatenate([value.ravel() for value in values if value.dtype == kind])
        for kind in kinds
    ]


def unfused(vectors: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The parts of vectors that `fused` has made of `values`, in the shapes of these."""
    rest = {vector.dtype: (vector, 0) for vector in vectors}
    parts = []
    for value in values:
        vector, begin = rest[value.dtype]
        end = begin + value.size
        parts.append(vector[begin:end].reshape(value.shape))
        rest[value.dtype] = (vector, end)
    return parts


def require_same_tree(leaves: Sequence[Leaf], group: Group) -> None:
    """*Together.* Raises `ModelMismatchError` on every rank, naming the first leaf that differs."""
    everyone = group.gather_json([list(leaf) for leaf in leaves])
    for rank, theirs in enumerate(everyone):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first != other:
                raise ModelMismatchError(
                    f"the trees of the ranks differ: {_shown(first)} on rank 0 is {_shown(other)} "
                    f"on rank {rank}. Build the same tree on every rank."
                )
        if len(theirs) != len(everyone[0]):
            more, fewer = (rank, 0) if len(theirs) > len(everyone[0]) else (0, rank)
            extra = everyone[more][len(everyone[fewer])]
            raise ModelMismatchError(
                f"the trees of the ranks differ: rank {more} has {_shown(extra)}, and rank {fewer} "
                "does not. Build the same tree on every rank."
            )


def _shown(leaf: Sequence[Any]) -> str:
    name, shape, kind = leaf
    return f"{name!r} {tuple(shape)} {kind}"
