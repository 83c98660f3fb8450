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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from farandole.errors import UserError
from farandole.layout.objective import LossFunction

_BY_TARGETS = (F.cross_entropy, F.nll_loss)
_CLOSE = 1e-6  # weights of classes are added up in single precision

Described = tuple[int, int, list[float]]
"""A micro-batch: its number, its samples, what its means were divided by."""


class Seen(NamedTuple):
    """Of a micro-batch: what its means were divided by, as numbers, or on the device so far."""

    step: int
    micro: int
    samples: int
    divisors: list[float | torch.Tensor]


class MaskedMeans:
    """Of one rank's last stage: by what the means in each step were divided, for each sample.

    The numbers are read and compared when `check` is called, and not after each forward: a device
    that computes behind the host's back would have to be waited for each time.
    """

    def __init__(self) -> None:
        self._step = -1
        self._pending: list[Seen] = []
        self._is_first = True  # of its step on this rank
        self._has_means = True
        self._in_layers = True
        self._first: Seen | None = None  # of the step that was checked last

    def of(self, step: int, micro: int, samples: int) -> AbstractContextManager[Watch | None]:
        """Around the forward of a micro-batch."""
        # Micro-batches of one step are compared with each other only: another batch may be masked
        # otherwise.
        if self._step != step:
            self._step = step
            self._is_first = self._has_means = self._in_layers = True
        # To watch costs something with every operation. All are compared with the first
        # micro-batch, so where that has no mean, nobody needs to look for those of the others.
        return self._seen(micro, samples) if self._has_means else nullcontext()

    @contextmanager
    def _seen(self, micro: int, samples: int) -> Iterator[Watch]:
        watch = Watch(in_layers=self._in_layers)
        with watch.open():
            yield watch
        self._pending.append(Seen(self._step, micro, samples, watch.divisors))
        if self._is_first:
            self._is_first, self._has_means = False, bool(watch.divisors)
            self._in_layers = watch.count_in_layers() > 0

    def check(self) -> None:
        """Before the gradients of a step are whole: raises `UserError` if one of the micro-batches
        since the last check is unlike another of its step."""
        pending, self._pending = self._pending, []
        for seen in _as_numbers(pending):
            if self._first is None or self._first.step != seen.step:
                self._first = seen
            else:
                compare(_described(self._first), _described(seen))

    def first_of(self, step: int) -> Described | None:
        """A micro-batch of a step that was checked; none if this rank has computed none."""
        if self._first is None or self._first.step != step:
            return None
        return _described(self._first)


def _described(seen: Seen) -> Described:
    return seen.micro, seen.samples, [float(each) for each in seen.divisors]


def _as_numbers(pending: list[Seen]) -> list[Seen]:
    """With a single wait for the device."""
    tensors = [each for seen in pending for each in seen.divisors if not isinstance(each, float)]
    if not tensors:
        return pending
    numbers = iter(torch.stack(tensors).tolist())
    return [
        seen._replace(
            divisors=[each if isinstance(each, float) else next(numbers) for each in seen.divisors]
        )
        for seen in pending
    ]


class Watch:
    """Of one micro-batch: sees the means in its loss, and `in_layers` too if asked to."""

    def __init__(self, *, in_layers: bool) -> None:
        self.divisors: list[float | torch.Tensor] = []
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


def compare(one: Described, other: Described) -> None:
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
    def __init__(self, divisors: list[float | torch.Tensor]) -> None:
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
            self.divisors.append(_double((target != ignore_index).sum()))
            return
        # Class by class, for targets on tiles can be compared and counted, but not be indices.
        classes = [each for each in range(len(weight)) if each != ignore_index]
        weights = weight.detach().double()
        self.divisors.append(
            sum((weights[each] * _double((target == each).sum()) for each in classes), start=0.0)
        )


def _double(count: torch.Tensor) -> float | torch.Tensor:
    """In double precision, on its device; of tiles a number."""
    return count.double() if type(count) is torch.Tensor else float(count)
