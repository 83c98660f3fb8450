"""What a recorded forward does beside the model's own operations: it checks that this batch is one
that the recording is right for.

A recording is of the sample. Sizes may differ from batch to batch, unless the model's code has
looked at one; then it must be the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from farandole.errors import UserError
from farandole.layout.arguments import Arguments


class Kind(NamedTuple):
    """What an argument was in the sample."""

    dtype: torch.dtype
    axes: int

    def __str__(self) -> str:
        return f"a tensor of {str(self.dtype)[6:]} with {self.axes} axes"


class Signature(NamedTuple):
    """What a recording was made with: the nest of arguments, and what each of them was."""

    spec: pytree.TreeSpec
    names: tuple[str, ...]
    leaves: tuple[Any, ...]  # a kind, for a tensor; a type, for a number; else the value

    def flat(self, arguments: Arguments) -> list[Any]:
        """All arguments in a row."""
        return pytree.tree_leaves(_in_order(*arguments))


def signature_of(arguments: Arguments) -> Signature:
    pairs, spec = pytree.tree_flatten_with_path(_in_order(*arguments))
    return Signature(
        spec,
        tuple(_name(path) for path, _ in pairs),
        tuple(_kind(leaf) for _, leaf in pairs),
    )


def checked(positional: tuple[Any, ...], named: Mapping[str, Any], sample: Signature) -> list[Any]:
    """The arguments in a row. Raises `UserError` naming the one that is unlike the sample's."""
    leaves, spec = pytree.tree_flatten(_in_order(positional, named))
    if spec != sample.spec:
        found = signature_of(Arguments(positional, dict(named)))
        raise UserError(
            f"the model was cut for the arguments {_listed(sample)}, those of sample=…, and is "
            f"given {_listed(found)}. Give every step and every prediction the same ones."
        )
    for name, leaf, wanted in zip(sample.names, leaves, sample.leaves, strict=True):
        if _kind(leaf) != wanted:
            raise UserError(
                f"the model was cut for a sample in which {name} is {_said(wanted)}, and here it "
                f"is {_said(_kind(leaf))}. Pass a sample like the batches."
            )
    return leaves


def require(found: Any, sample: Any, where: str) -> None:
    """Raises `UserError` when the model's code would go another way than it did for the sample."""
    # `True == 1` in Python, and code that branches on a type would take another way.
    if found != sample or type(found) is not type(sample):
        raise UserError(
            f"the model's code depends on the shape of its inputs ({where}): it found {sample} for "
            f"sample=…, for which the model was cut, and finds {found} for this batch. Give all "
            "batches the sample's shape, or put this code into a submodule of its own."
        )


def by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """A value that the model's code chooses by `self.training`."""
    return in_training if training else in_evaluation


def applied(function: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """A function that has no name of its own."""
    return function(*positional, **named)


class Unsent(NamedTuple):
    """Stands for a part of the model's output that cannot travel, such as a cache."""

    kind: str


class Output(NamedTuple):
    """How a model's output is made of its tensors."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # None for a tensor; else the value, in a tuple

    def made_of(self, tensors: list[Any]) -> Any:
        coming = iter(tensors)
        leaves = [next(coming) if leaf is None else leaf[0] for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def rebuilt(output: Output, tensors: list[Any]) -> Any:
    """The model's output, as its own code returns it."""
    return output.made_of(tensors)


def _in_order(positional: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, Any]:
    """Keyword arguments have no order, and a dictionary has."""
    return positional, dict(sorted(named.items()))


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return Kind(leaf.dtype, leaf.dim())
    return type(leaf) if type(leaf) in (int, float) else leaf


def _said(kind: Any) -> str:
    if isinstance(kind, type):
        return f"a number ({kind.__name__})"
    return str(kind) if isinstance(kind, Kind) else repr(kind)


def _name(path: Any) -> str:
    """`0` of positional arguments, `labels` of named ones, `1.mask` of one in a nest."""
    return ".".join(str(getattr(key, "idx", getattr(key, "key", key))) for key in path[1:])


def _listed(signature: Signature) -> str:
    return ", ".join(signature.names) or "none"
