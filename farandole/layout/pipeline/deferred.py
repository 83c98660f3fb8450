"""BatchNorm whose running statistics move once a step, as they do without micro-batches.

Each micro-batch is normalised by its own mean and variance; that cannot be helped. But an ordinary
BatchNorm would also move its running statistics with each of them, so that they would depend on how
many there are. This one adds up sums over the micro-batches and moves once, by those of the whole
batch: what evaluation uses is then what it would be without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from farandole.comm import Group
from farandole.layout.pipeline.sums import sum_over
from farandole.layout.tiles.ops.statistics import mean_and_variance, widened

Counted = Callable[[torch.Tensor], Sequence[tuple[slice, torch.Tensor]]]


def _all_of_it(input: torch.Tensor) -> Sequence[tuple[slice, torch.Tensor]]:
    return [(slice(None), input)]


class DeferredBatchNorm(_BatchNorm):
    """Takes the place of any BatchNorm; made by `defer_statistics`."""

    def __init__(self, original: _BatchNorm) -> None:
        super().__init__(
            original.num_features, original.eps, original.momentum, original.affine, True
        )
        self.weight, self.bias = original.weight, original.bias
        self.running_mean, self.running_var = original.running_mean, original.running_var
        self.num_batches_tracked = original.num_batches_tracked
        self.total: torch.Tensor
        self.total_of_squares: torch.Tensor
        self.count: torch.Tensor
        self.counted: Counted = _all_of_it
        """What of an input is this rank's own, and which channels it is of."""
        self.train(original.training)
        like = original.running_mean
        assert like is not None
        for name in ("total", "total_of_squares"):
            sums = torch.zeros_like(like, dtype=torch.float64)  # differences of these are taken
            self.register_buffer(name, sums, persistent=False)
        self.register_buffer("count", torch.zeros_like(sums[0]), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        with torch.no_grad():
            for channels, own in self.counted(input):
                if not own.numel():
                    continue
                # One look at the values. To square them takes a copy of them all, and the squares
                # of half precision may be too large for it.
                mean, variance = (each.double() for each in mean_and_variance(widened(own)))
                values = own.numel() // own.shape[1]  # in a channel
                self.total[channels].add_(mean, alpha=values)
                self.total_of_squares[channels].add_(variance.addcmul_(mean, mean), alpha=values)
                # Where ranks have different channels, they all add to one count.
                self.count += own.numel() / self.num_features
        # Without running statistics, so that torch does not move them with this micro-batch.
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        return

    @property
    def sums(self) -> list[torch.Tensor]:
        """Since the last commit."""
        return [self.total, self.total_of_squares, self.count]

    @torch.no_grad()
    def commit(self, count: float) -> None:
        """The step is over: moves the running statistics by those of its whole batch. `count` is
        that of the sums."""
        if not count:
            return
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:  # a plain average over all steps
            momentum = 1.0 / float(self.num_batches_tracked)
        mean = self.total / count
        variance = self.total_of_squares / count - mean.square()
        # As BatchNorm does: it normalises by the biased variance, and remembers the unbiased one.
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        for each in self.sums:
            each.zero_()


def defer_statistics(module: nn.Module) -> None:
    """Replaces every BatchNorm inside that tracks statistics."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and child.track_running_stats:
                setattr(parent, name, DeferredBatchNorm(child))


def share_statistics(module: nn.Module, holders: Group) -> None:
    """Ranks that hold the same stages have each seen some of the micro-batches: what they know is
    put together, exactly where sums are kept, and else by averaging."""
    sums: list[torch.Tensor] = []
    averages: list[torch.Tensor] = []
    for norm in module.modules():
        if isinstance(norm, DeferredBatchNorm):
            sums += norm.sums
        elif isinstance(norm, _NormBase) and norm.training and norm.track_running_stats:
            statistics = (norm.running_mean, norm.running_var)
            # Past autograd: graphs of batches that are under way hold on to these.
            averages += [each.data for each in statistics if each is not None]
    if averages:
        # Divided before the sum, so that one all-reduce serves for both: sums stay sums, and these
        # become averages.
        torch._foreach_div_(averages, holders.size)
    if sums or averages:
        sum_over(holders, [*sums, *averages])


def commit_statistics(module: nn.Module) -> None:
    norms = [norm for norm in module.modules() if isinstance(norm, DeferredBatchNorm)]
    if not norms:
        return
    # All at once: to read a number from a GPU is to wait for it.
    counts = torch.stack([norm.count for norm in norms]).tolist()
    for norm, count in zip(norms, counts, strict=True):
        norm.commit(count)
