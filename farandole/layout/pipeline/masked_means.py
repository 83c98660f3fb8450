"""Checks that the loss of a batch is the mean of the losses of its micro-batches.

A micro-batch counts by its share of the samples. That is right for a mean over samples, and wrong
for one over what is not masked, if the micro-batches have different numbers of that:
`F.cross_entropy` divides by the targets that are not `ignore_index`, or by the weights of their
classes. So the last stage looks at what its means were divided by, and refuses what would be
weighed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from farandole.errors import UserError

_BY_TARGETS = (F.cross_entropy, F.nll_loss)
_CLOSE = 1e-6  # weights of classes are added up in single precision


class MaskedMeans:
    """Of one rank's last stage: by what the means in each step were divided, for each sample."""

    def __init__(self) -> None:
        self._step = -1
        self.first: tuple[int, int, list[float]] | None = None
        """A micro-batch of this step: its number, its samples, what its means were divided by."""

    @contextmanager
    def of(self, step: int, micro: int, samples: int) -> Iterator[None]:
        """Around the forward of a micro-batch. Raises `UserError` if it is unlike another."""
        with _Means() as means:
            yield
        # Micro-batches of one step are compared with each other only: another batch may be masked
        # otherwise.
        if self._step != step:
            self._step, self.first = step, None
        if self.first is None:
            self.first = (micro, samples, means.divisors)
        else:
            compare(self.first, (micro, samples, means.divisors))


def compare(one: tuple[int, int, list[float]], other: tuple[int, int, list[float]]) -> None:
    """Raises `UserError` when the means of two micro-batches cannot be weighed by samples."""
    for first, second in zip(one[2], other[2], strict=False):
        shares = first / one[1], second / other[1]
        if abs(shares[0] - shares[1]) > _CLOSE * max(shares):
            raise UserError(
                f"the loss is a mean over the targets that count (not ignore_index; by the weights "
                f"of their classes), which are {first:g} in the {one[1]} samples of micro-batch "
                f"{one[0]} and {second:g} in the {other[1]} of micro-batch {other[0]}. Their mean "
                "is not that of the batch. Say what a micro-batch counts by, run.trainer(…, "
                "loss_weight=lambda inputs, targets: (targets != -100).sum()), or leave "
                "microbatches out."
            )


class _Means(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[float] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BY_TARGETS:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        **_: Any,
    ) -> None:
        if size_average is not None or reduce is not None:  # the older words for it
            reduction = "mean" if size_average is not False and reduce is not False else "other"
        if reduction != "mean" or target.is_floating_point():
            return
        if weight is None:
            self.divisors.append(float((target != ignore_index).sum()))
            return
        # Class by class, for targets on tiles can be compared and counted, but not be indices.
        counts = {each: float((target == each).sum()) for each in range(len(weight))}
        counts.pop(ignore_index, None)
        self.divisors.append(sum(float(weight[each]) * count for each, count in counts.items()))
