"""What a trainer minimises: a loss of the model's output, or what the model itself computes.

A model computes its own loss if its output is one number, has a `loss` (as an attribute or a key,
as Hugging Face's have), or is a tuple with one number in it (as nanoGPT's `logits, loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from farandole.errors import UserError
from farandole.layout.arguments import Arguments, arguments_of

LossFunction = Callable[[Any, Any], torch.Tensor]
LossWeight = Callable[[Any, Any], "float | torch.Tensor"]


@dataclass(frozen=True)
class Objective:
    """`loss(model(inputs), targets)`; without `loss`, what the model says of inputs and targets.

    `weight` returns what the loss of a micro-batch counts by, from its inputs and targets: what its
    mean is divided by. None: its number of samples.
    """

    loss: LossFunction | None
    weight: LossWeight | None = None

    def arguments(self, inputs: Any, targets: Any) -> Arguments:
        """What the model is given. Without a loss function, the targets are its last argument."""
        if self.loss is not None or targets is None:
            return arguments_of(inputs)
        if isinstance(inputs, Mapping):
            raise UserError(
                "loss=None: the model computes its own loss, and its inputs are keyword arguments, "
                "so that targets have no place. Put them into the dictionary: step({…, 'labels': "
                "targets})."
            )
        given = arguments_of(inputs)
        return Arguments((*given.positional, targets), given.named)

    def of(self, output: Any, targets: Any) -> torch.Tensor:
        """The loss."""
        return own_loss(output) if self.loss is None else self.loss(output, targets)


def own_loss(output: Any) -> torch.Tensor:
    """The loss in a model's output. Raises `UserError` if there is none, or if it is not clear."""
    found = _found(output)
    if found is None:
        raise UserError(
            "loss=None: the model shall compute its own loss, and its output is "
            f"{_described(output)}. It must be one number, have a `loss`, or be a tuple with "
            "exactly one number in it. Give the model its targets too (labels=…, or step(x, y)), "
            "or pass a loss function."
        )
    return found


def _found(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if _is_loss(output) else None
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"] if _is_loss(output["loss"]) else None
    if hasattr(output, "loss"):
        return output.loss if _is_loss(output.loss) else None
    if isinstance(output, (tuple, list)):
        numbers = [each for each in output if _is_loss(each)]
        return numbers[0] if len(numbers) == 1 else None
    return None


def _is_loss(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and tuple(value.shape) == ()
    )


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of {tuple(output.shape)}, {output.dtype}"
    if isinstance(output, Mapping):
        return f"a dictionary of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, (tuple, list)):
        return f"({', '.join(map(_described, output))})"
    return "None" if output is None else f"a {type(output).__name__}"


def one_number(loss: Any) -> torch.Tensor:
    """Raises `UserError` for a loss that is more."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UserError(f"the loss must be a tensor with one element, not {found}.")
    # Subclasses, such as tiles, may make something else of it.
    return loss if type(loss) is torch.Tensor and not loss.dim() else loss.reshape(())
