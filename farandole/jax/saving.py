"""Trees of JAX's arrays in the run's checkpoints, beside the parameters of `fd.jax.average`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import torch

from farandole.comm.buffers import from_buffer, to_array
from farandole.errors import CheckpointError
from farandole.jax.trees import taken_apart


def to_saved(tree: Any) -> list[dict[str, Any]]:
    values, described = taken_apart(tree, "checkpoint")
    return [
        {"name": name, "value": from_buffer(value).clone()}
        for name, value in zip(described.names, values, strict=True)
    ]


def from_saved(saved: Sequence[dict[str, Any]], like: Any) -> Any:
    """A tree of the structure of `like`. Raises `CheckpointError` naming a leaf that differs."""
    values, described = taken_apart(like, "checkpoint")
    found = [(leaf["name"], *_kind(leaf["value"])) for leaf in saved]
    tensors = [from_buffer(value) for value in values]
    wanted = [(n, *_kind(t)) for n, t in zip(described.names, tensors, strict=True)]
    if found != wanted:
        pairs = zip(found, wanted, strict=False)
        differs = next((pair for pair in pairs if pair[0] != pair[1]), None)
        raise CheckpointError(
            "the checkpoint holds another tree: "
            + (f"{differs[0]}, and not {differs[1]}." if differs else f"{len(found)} leaves.")
        )
    return described.rebuild([jnp.array(to_array(leaf["value"])) for leaf in saved])


def _kind(value: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(value.shape), str(value.dtype).removeprefix("torch.")
