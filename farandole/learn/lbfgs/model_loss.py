"""The loss of a model as a function of one vector of parameters.

The model that travels to workers has no numbers in it: its tensors are on torch's meta device. The
parameters come as a vector with each pass; buffers and frozen parameters travel once, as they are.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from farandole.errors import UserError
from farandole.learn.lbfgs.vectors import Vector

Loss = Callable[..., torch.Tensor]


class ModelLoss:
    """`loss(model(x), y)`, or `loss(model(x))` without y: a mean over rows, as torch's are."""

    def __init__(self, loss: Loss, model: nn.Module) -> None:
        self._loss = loss
        self._shapes = {
            name: tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        _require_fit(model, len(self._shapes))
        trained = {id(model.get_parameter(name)): name for name in self._shapes}
        every: dict[str, torch.Tensor] = {}
        every |= dict(model.named_parameters(remove_duplicate=False))
        every |= dict(model.named_buffers(remove_duplicate=False))
        # A parameter may have several names; all stand for the first.
        self._aliases = {name: trained[id(t)] for name, t in every.items() if id(t) in trained}
        self._fixed = {
            name: tensor.detach().clone()
            for name, tensor in every.items()
            if name not in self._aliases
        }
        self._dtypes = {name: model.get_parameter(name).dtype for name in self._shapes}
        self._skeleton = copy.deepcopy(model).to("meta")
        self._copies: dict[int, nn.Module] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copies": {}}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters that are trained, in the order of the vector."""
        return self._shapes

    @property
    def length(self) -> int:
        """Of the vector."""
        return sum(int(np.prod(shape)) for shape in self._shapes.values())

    def vector_of(self, model: nn.Module) -> Vector:
        parts = [model.get_parameter(name).detach().reshape(-1) for name in self._shapes]
        found: Vector = torch.cat([part.to("cpu", torch.float64) for part in parts]).numpy()
        return found

    def load(self, vector: Vector, model: nn.Module) -> None:
        """Into the model, in place."""
        with torch.no_grad():
            for name, values in self._split(torch.from_numpy(vector)).items():
                model.get_parameter(name).copy_(values)

    def at(
        self, vector: Vector, x: npt.NDArray[Any], y: npt.NDArray[Any] | None
    ) -> tuple[float, Vector]:
        """The loss of these rows and its gradient."""
        parameters = {
            name: values.to(self._dtypes[name], copy=True).requires_grad_()
            for name, values in self._split(torch.tensor(vector)).items()
        }
        with one_torch_thread(), torch.enable_grad():
            loss = self._value(parameters, x, y)
            tensors = list(parameters.values())
            gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
        flat = [
            (torch.zeros_like(tensor) if gradient is None else gradient).reshape(-1).double()
            for tensor, gradient in zip(tensors, gradients, strict=True)
        ]
        found: Vector = torch.cat(flat).numpy()
        return float(loss.detach()), found

    def value(self, vector: Vector, x: npt.NDArray[Any], y: npt.NDArray[Any] | None) -> float:
        """The loss alone."""
        split = self._split(torch.tensor(vector))
        parameters = {name: values.to(self._dtypes[name]) for name, values in split.items()}
        with one_torch_thread(), torch.no_grad():
            return float(self._value(parameters, x, y))

    def _value(
        self, parameters: dict[str, torch.Tensor], x: npt.NDArray[Any], y: Any
    ) -> torch.Tensor:
        tensors = {name: parameters[first] for name, first in self._aliases.items()}
        # Buffers may be written to, such as the means of BatchNorm: not those of the next call.
        fixed = {name: tensor.clone() for name, tensor in self._fixed.items()}
        output = functional_call(self._model(), tensors | fixed, (self._tensor(x),))
        loss = self._loss(output) if y is None else self._loss(output, self._tensor(y))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UserError(f"the loss must be one number, the mean over rows; it is {kind}.")
        return loss.reshape(())

    def _model(self) -> nn.Module:
        """One for each thread: a call puts the tensors into the module while it lasts."""
        thread = threading.get_ident()
        if thread not in self._copies:
            self._copies[thread] = copy.deepcopy(self._skeleton)
        return self._copies[thread]

    def _tensor(self, rows: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.tensor(rows)
        if tensor.is_floating_point():
            return tensor.to(next(iter(self._dtypes.values())))
        return tensor if tensor.dtype == torch.bool else tensor.long()

    def _split(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes = [int(np.prod(shape)) for shape in self._shapes.values()]
        parts = vector.split(sizes)
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }


def require_mean(function: ModelLoss, vector: Vector, x: Any, y: Any) -> None:
    """That the loss of some rows is the mean of the losses of each: else pieces of the batch would
    not add up to the whole. Raises `UserError`."""
    rows = len(x)
    if rows < 2:
        return
    half = rows // 2
    parts = [slice(0, half), slice(half, rows)]
    losses = [function.value(vector, x[part], None if y is None else y[part]) for part in parts]
    mean = (half * losses[0] + (rows - half) * losses[1]) / rows
    whole = function.value(vector, x, y)
    if np.isfinite(whole) and abs(whole - mean) > 1e-4 * max(1e-3, abs(whole), abs(mean)):
        raise UserError(
            f"the loss of {rows} rows is {whole:.6g}, and the mean of the losses of its halves "
            f"{mean:.6g}: it is not a mean over rows, so it cannot be computed in pieces. A loss "
            "with reduction='sum', BatchNorm in training and dropout are such cases: use "
            "reduction='mean', and call model.eval() first."
        )


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Inside, torch computes by one core: workers take the others, and the last bits of a sum may
    depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _require_fit(model: nn.Module, trained: int) -> None:
    if not trained:
        raise UserError("the model has no parameters that require gradients: there is no fit.")
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise UserError(
                f"the parameter {name!r} is on {parameter.device}, and LBFGS computes on CPUs. "
                "Call model.cpu() first."
            )
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise UserError(f"the parameter {name!r} is of {parameter.dtype}: give real numbers.")
