"""Auxiliary heads without leaving the sequence.

GoogLeNet and Inception v3 can have extra classifiers half way, whose losses help training. Here
such a head is a block like any other: it passes the main activation on and, in training, appends
its logits, so that what travels becomes a tuple

    stem ── … ── 4a ── aux1 ── 4b ── … ── aux2 ── 4e ── … ── head
         x           x      (x, a1)            (x, a1, a2)      (logits, a1, a2)

The blocks behind the first head are wrapped in `Carry`, which works on the first entry and lets
the rest ride along. The logits are small, so a cut behind a head costs little more to send.
In evaluation the heads do nothing and the model returns plain logits.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


class Carry(nn.Module):
    """Runs a block on the main activation; auxiliary logits, if there are any, ride along."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, travelling: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if isinstance(travelling, Tensor):
            return self.block(travelling)  # type: ignore[no-any-return]
        main, *logits = travelling
        return (self.block(main), *logits)


class AuxiliaryHead(nn.Module):
    """Passes the main activation on; in training it appends its own logits."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, travelling: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        if not self.training:
            return travelling
        main, *logits = (travelling,) if isinstance(travelling, Tensor) else travelling
        return (main, *logits, self.head(main))


def with_auxiliary(
    loss: Loss, weight: float = 0.3
) -> Callable[[Tensor | tuple[Tensor, ...], Tensor], Tensor]:
    """`loss`, extended to the tuple of a model with auxiliary heads; plain logits work too.

    The paper on GoogLeNet weighs its auxiliary losses by 0.3.
    """

    def total(outputs: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return loss(outputs, target)
        main, *auxiliary = outputs
        value = loss(main, target)
        for logits in auxiliary:
            value = value + weight * loss(logits, target)
        return value

    return total
