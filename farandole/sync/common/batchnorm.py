"""BatchNorm over the samples of all ranks, on any device.

PyTorch's SyncBatchNorm refuses CPU tensors; this one is plain tensor arithmetic and sums over
ranks, so it runs wherever these do. Ranks may hold different numbers of samples.

With N, Σx and Σx² summed over ranks, mean μ and variance σ² are those of the whole global batch.
For the gradient, write x̂ = (x − μ)/σ and let g be the gradient of x̂ (that of the output times
the weight). Then dx = (g − mean(g) − x̂·mean(g·x̂))/σ, both means again over all ranks. The
gradients of weight and bias stay local: the strategy averages them like all others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, Self, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from farandole.comm import Group
from farandole.errors import UserError
from farandole.sync.common.weighing import Weighing

Part = Literal["mean", "variance", "gradient"]
"""Which of its three sums a layer asks for."""
Total = Callable[[torch.Tensor, Part], torch.Tensor]
"""Its sum over all ranks."""


def synchronise_batchnorm(
    module: nn.Module, group: Group, weighing: Weighing | None = None
) -> nn.Module:
    """Replaces every BatchNorm in `module`, in place; returns the module (or its replacement).

    Raises `UserError` for a CUDA graph that would go on with the layers of before.
    """
    _refuse_graphed(module)

    def replacement(old: _BatchNorm) -> SharedBatchNorm:
        new = SharedBatchNorm.taking_over(old)
        new.group, new.weighing = group, weighing
        # A compiled model leaves its graph here: what ranks say to each other cannot be in it.
        new.normalise = torch.compiler.disable(_Normalise.apply)
        return new

    return replace_batchnorm(module, replacement)


def _refuse_graphed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if "make_graphed_callables" in getattr(forward, "__qualname__", ""):
            where = f"its part {name!r}" if name else "this model"
            raise UserError(
                f"torch.cuda.make_graphed_callables has captured {where}, and batchnorm=sync "
                "replaces layers, which the graph would not notice. Leave one of the two out."
            )


def replace_batchnorm(
    module: nn.Module, replacement: Callable[[_BatchNorm], SummedBatchNorm]
) -> nn.Module:
    """Like `synchronise_batchnorm`; leaves layers alone that sum over ranks already."""
    replacements: dict[nn.Module, nn.Module] = {}

    def replaced(old: nn.Module) -> nn.Module:
        if isinstance(old, _BatchNorm) and not isinstance(old, SummedBatchNorm):
            if old not in replacements:  # one layer may stand in several places
                replacements[old] = replacement(old)
            return replacements[old]
        for name, child in old._modules.items():
            if child is not None:
                setattr(old, name, replaced(child))
        return old

    return replaced(module)


class SummedBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d and 3d in one: the channel is dimension 1 whatever the rank of the input.

    Who extends it says how sums over ranks are taken.
    """

    normalise: Callable[..., Any] | None = None  # instead of `_Normalise.apply`

    def sum_over_ranks(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def taking_over(cls, old: _BatchNorm) -> Self:
        """A replacement that shares `old`'s parameters and buffers, so optimizers keep working."""
        new = cls(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats)
        new._parameters = old._parameters
        new._buffers = old._buffers
        new.training = old.training
        return new

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm needs at least 2 dimensions, got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training:  # no communication: one rank may well evaluate alone
            return super().forward(input)
        normalise = self.normalise or _Normalise.apply
        normal, mean, variance, count = normalise(input, self.eps, self.sum_over_ranks)
        if self.track_running_stats:
            self._track(mean, variance, count)
        shape = (1, -1, *[1] * (input.dim() - 2))
        if self.weight is not None:
            normal = normal * self.weight.view(shape)
        if self.bias is not None:  # some have a weight only
            normal = normal + self.bias.view(shape)
        return cast(torch.Tensor, normal.to(input.dtype))

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # cumulative average, as in torch
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class SharedBatchNorm(SummedBatchNorm):
    """Sums over a `Group`. One that comes out of a pickle is alone."""

    group: Group | None = None
    weighing: Weighing | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and self.group is not None and self.weighing is not None:
            all_read_it = self.weighing.readers == self.group.size > 1
            if all_read_it and input.numel() == input.shape[1]:
                raise ValueError(  # as torch does
                    f"Expected more than 1 value per channel when training, got input size "
                    f"{tuple(input.shape)}: the last step of this epoch has one sample. Use "
                    "drop_last=True or another batch size."
                )
        return super().forward(input)

    def sum_over_ranks(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        if self.group is None:
            return tensor
        if self.weighing is None:
            return self.group.all_reduce(tensor)
        # A sample that several ranks have read is one sample: each counts its part of it.
        readers = self.weighing.readers
        if part != "gradient":
            return self.group.all_reduce(tensor if readers == 1 else tensor.div_(readers))
        # `Weighing` scales this rank's gradients when they are added to parameters, after this
        # layer. Other ranks' gradients enter here and leave through this rank's parameters: they
        # are multiplied by their weight now, and divided by this rank's, which follows.
        weight = self.weighing.weight
        return self.group.all_reduce(tensor.mul_(weight)).div_(weight * readers)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBatchNorm:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        ours = ("group", "weighing", "normalise")
        return {k: v for k, v in self.__dict__.items() if k not in ours}


class _Normalise(torch.autograd.Function):
    """x̂, μ, σ² and N over all ranks, in at least single precision; only x̂ is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        eps: float,
        total: Total,
    ) -> Any:
        axes = [0, *range(2, x.dim())]
        shape = (1, -1, *[1] * (x.dim() - 2))
        wide = x if x.dtype == torch.float64 else x.float()  # half precision cannot hold the sums
        count = torch.full((1,), x.numel() / x.shape[1], dtype=wide.dtype, device=x.device)
        totals = total(torch.cat([wide.sum(axes), count]), "mean")
        count = totals[-1].round()  # parts of samples add up to whole ones
        mean = totals[:-1] / count
        # Second pass around the common mean: exact where Σx² − (Σx)²/N would cancel.
        centred = wide - mean.view(shape)
        variance = total(centred.square().sum(axes), "variance") / count
        inverse = torch.rsqrt(variance + eps)
        normal = centred * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, count)
        ctx.total, ctx.dtype = total, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        normal, inverse, count = ctx.saved_tensors
        axes = [0, *range(2, grad.dim())]
        shape = (1, -1, *[1] * (grad.dim() - 2))
        sums = torch.stack([grad.sum(axes), (grad * normal).sum(axes)])
        means = ctx.total(sums, "gradient") / count
        centred = grad - means[0].view(shape) - normal * means[1].view(shape)
        return (centred * inverse.view(shape)).to(ctx.dtype), None, None
