"""Checks that the loss of a batch is the mean of the losses of its micro-batches.

A micro-batch counts by its share of the samples. That is right for a mean over samples, and wrong
for one over what is not masked, if the micro-batches have different numbers of that:
`F.cross_entropy` divides by the targets that are not `ignore_index`, or by the weights of their
classes. So the last stage looks at what its means were divided by, and refuses what would be
weighed wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from farandole.errors import UserError
from farandole.layout.objective import LossFunction

_BY_TARGETS = (F.cross_entropy, F.nll_loss)
_CLOSE = 1e-6  # weights of classes are added up in single precision


class MaskedMeans:
    """Of one rank's last stage: by what the means in each step were divided, for each sample."""

    def __init__(self) -> None:
        self._step = -1
        self._in_layers = True
        self.first: tuple[int, int, list[float]] | None = None
        """A micro-batch of this step: its number, its samples, what its means were divided by."""

    def of(self, step: int, micro: int, samples: int) -> AbstractContextManager[Watch | None]:
        """Around the forward of a micro-batch. Raises `UserError` if it is unlike another."""
        # Micro-batches of one step are compared with each other only: another batch may be masked
        # otherwise.
        if self._step != step:
            self._step, self.first, self._in_layers = step, None, True
        # To watch costs something with every operation. All are compared with the first
        # micro-batch, so where that has no mean, nobody needs to look for those of the others.
        if self.first is not None and not self.first[2]:
            return nullcontext()
        return self._compared(micro, samples)

    @contextmanager
    def _compared(self, micro: int, samples: int) -> Iterator[Watch]:
        watch = Watch(in_layers=self._in_layers)
        with watch.open():
            yield watch
        if self.first is None:
            self.first = (micro, samples, watch.divisors)
            self._in_layers = watch.count_in_layers() > 0
        else:
            compare(self.first, (micro, samples, watch.divisors))


class Watch:
    """Of one micro-batch: sees the means in its loss, and `in_layers` too if asked to."""

    def __init__(self, *, in_layers: bool) -> None:
        self.divisors: list[float] = []
        self._in_layers = in_layers
        self._before_loss: int | None = None
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Around the forward."""
        self._is_open = True
        try:
            with _Means(self.divisors) if self._in_layers else nullcontext():
                yield
        finally:
            self._is_open = False

    def around(self, loss: LossFunction) -> LossFunction:
        """The loss function, watched."""

        def watched(output: Any, target: Any) -> torch.Tensor:
            if not self._is_open:  # it is computed again, in the backward pass
                return loss(output, target)
            if self._before_loss is None:
                self._before_loss = len(self.divisors)
            with nullcontext() if self._in_layers else _Means(self.divisors):
                return loss(output, target)

        return watched

    def count_in_layers(self) -> int:
        """How many means there were before the loss."""
        return len(self.divisors) if self._before_loss is None else self._before_loss


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
    def __init__(self, divisors: list[float]) -> None:
        super().__init__()
        self.divisors = divisors

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
