"""Whether each backward pass is followed by a step of the optimizer, as strategies that are late
need it.

    optimizer's script     pass step pass step pass step
    gradients in parts     pass pass step pass pass step          without no_sync
    a GAN, not frozen      pass step pass      pass step pass     of the discriminator

In the second, what arrives late is added to gradients of another step. In the third the generator's
pass leaves gradients in the discriminator, which the script throws away: late ones come when those
of the discriminator's own loss are expected.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Final

from farandole.errors import UserError

# A GradScaler leaves out steps too, and halves its scale with each. So often, between steps that it
# takes, it hardly ever does.
_WITHIN_PASSES: Final = 24
_TOO_MANY: Final = 3


class UnusedPasses:
    """Of one model. All ranks have the same passes and, except by a GradScaler, the same steps."""

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._were_used: deque[bool] = deque(maxlen=_WITHIN_PASSES)
        self._is_used = False
        self._has_begun = False

    def step(self) -> None:
        """The optimizer takes the gradients that are there."""
        self._is_used = True

    def begin_pass(self) -> None:
        """Raises `UserError` where passes keep being left out between others that are not."""
        if self._has_begun:
            self._were_used.append(self._is_used)
        self._has_begun, self._is_used = True, False
        used = list(self._were_used)
        left_out = sum(before and not after for before, after in pairwise(used))
        if left_out >= _TOO_MANY:
            raise UserError(
                f"{self._strategy} needs a step of the optimizer after each backward pass, and "
                f"{used.count(False)} of the last {len(used)} passes through this model had none. "
                "Put passes that only add to gradients under `with run.no_sync(model):`, freeze a "
                "model while another one's loss goes through it (`model.requires_grad_(False)`), "
                "or take --sync allreduce, which needs neither."
            )
