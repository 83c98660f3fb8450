"""Whether optimizers have stepped: in between, gradients accumulate, and no checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch.optim import Optimizer

_NEVER: Final = 100  # batches: who has made no step by then, makes none


class OptimizerSteps:
    """Counts the steps of optimizers that a script steps itself."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._count = 0
        self._seen = 0
        self._unseen = 0  # calls before the first step
        self._watches = False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note)
            self._watches = True

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._count += 1

    def are_done(self) -> bool:
        """Whether one was made since the last call.

        Also true where no step is ever seen, because the script has no optimizer, or changes its
        parameters by other means: then the count says nothing.
        """
        if self._count == 0:
            self._unseen += 1
            return not self._watches or self._unseen > _NEVER
        done = self._count != self._seen
        self._seen = self._count
        return done
