"""The average of all ranks' models: parameters, BatchNorm's statistics, the optimizer's moments.

With a codec, what travels is how far each rank has moved from where all of them once stood, not
where it stands: steps are small and compress well, and the model itself is never rounded.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Codec, Compressor
from farandole.sync.common.flat import Flat, moments_of, statistics_of, weights_of


class ModelAverage:
    """Averages one model over the ranks of a group. All ranks call everything together."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, group: Group, codec: Codec | None = None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self._compressor: Compressor | None = codec.build() if codec else None
        self._memory = ExitStack()
        weakref.finalize(self, self._memory.close)
        self.weights = Flat({})
        """The parameters' places: after `gather` this rank's, after `average` the average."""
        self._statistics = Flat({})
        self.base: list[torch.Tensor] | None = None
        """The parameters that all ranks once had in common, if a codec or an outer optimizer needs
        them. The same bits on all ranks."""
        self._frozen: list[nn.Parameter] = []  # until somebody trains them
        self._registered = False
        self._refresh()
        self.weights.gather()
        if codec:
            self.remember()

    def gather(self) -> str | None:
        """Copies this rank's model here; returns the name of the first tensor that is not finite.

        Only parameters are checked. Statistics that are not finite make parameters so one step
        later.
        """
        self._refresh()
        self._register()
        self.weights.gather()
        self._statistics.gather()
        return None if self.weights.is_finite() else self.weights.first_not_finite()

    def average(self, weight: float | None = None) -> None:
        """Averages what `gather` has copied.

        `weight` is this rank's; the weights of all ranks add up to 1. None: all count the same.
        """
        if self._group.size == 1:
            return
        if self._compressor is not None and self.base is not None:
            self._average_compressed(self._compressor, self.base, weight)
        else:
            self._average(self.weights, weight)
        self._average(self._statistics, weight)

    def average_statistics(self) -> None:
        """Averages the statistics only: the parameters are known to be the same."""
        self._average(self._statistics, None)

    def scatter(self) -> None:
        """Copies what is here into this rank's model."""
        self.weights.scatter()
        self._statistics.scatter()

    def remember(self) -> None:
        """Makes the parameters that are here the base."""
        self.base = self.weights.copies()

    def start_here(self) -> None:
        """Makes the model as it is the base, if a base is kept. Needs no other rank."""
        if self.base is not None:
            self._refresh()
            self.weights.gather()
            self.remember()

    def before_step(self) -> None:
        """Takes in parameters that were frozen and are trained from this step on."""
        # Before the step: now such a parameter is still the same on all ranks, and can be its own
        # base. After the step it differs, and no common base could be found any more.
        if self.base is not None and any(parameter.requires_grad for parameter in self._frozen):
            self._refresh()

    def average_moments(self) -> None:
        """Averages the optimizer's moments. All ranks must remember the same things."""
        moments = Flat(moments_of(self._optimizer))
        moments.gather()
        self._average(moments, None)
        moments.scatter()

    def forget_moments(self) -> None:
        for moment in moments_of(self._optimizer).values():
            moment.zero_()
        for state in self._optimizer.state.values():
            # Adam corrects its moments for their bias by the number of steps. Moments of zero with
            # an old count would be taken for an average over many steps.
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()

    def whole_model(self) -> dict[str, Any]:
        """The averaged model, as a state of its own: this rank's stays as it is."""
        self.gather()
        self._average(self.weights, None)
        self._average(self._statistics, None)
        views = {**self.weights.views, **self._statistics.views}
        state = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._model.state_dict().items()
        }
        for name, value in state.items():
            if name in views:
                value.copy_(_like(value, views[name]))
        _follow_ties(self._model, state)
        return state

    def _average(self, flat: Flat, weight: float | None) -> None:
        for buffer in flat.buffers:
            if weight is None:
                self._group.all_reduce(buffer, "average")
                continue
            if weight == 0.0:
                buffer.zero_()  # not `mul_`: what does not count may be infinite or NaN
            else:
                buffer.mul_(weight)
            self._group.all_reduce(buffer)

    def _average_compressed(
        self, compressor: Compressor, base: list[torch.Tensor], weight: float | None
    ) -> None:
        # A codec averages, that is, divides by the number of ranks: the scale makes up for that.
        scale = 1.0 if weight is None else weight * self._group.size
        for buffer, where in zip(self.weights.buffers, base, strict=True):
            buffer.sub_(where)
            if scale == 0.0:
                buffer.zero_()
            elif scale != 1.0:
                buffer.mul_(scale)
        compressor.average(self.weights.views, self._group)
        for buffer, where in zip(self.weights.buffers, base, strict=True):
            buffer.add_(where)

    def _refresh(self) -> None:
        """Makes room again where the model has got other tensors, or other ones are trained."""
        weights = weights_of(self._model, known=list(self.weights.views))
        statistics = statistics_of(self._model)
        if not self.weights.holds(weights) or not self._statistics.holds(statistics):
            self._make_room(weights, statistics)

    def _make_room(
        self, weights: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]
    ) -> None:
        before, self.weights, self._statistics = self.weights, Flat(weights), Flat(statistics)
        self._frozen = [p for name, p in self._model.named_parameters() if name not in weights]
        self._registered = False
        if self.base is not None:
            # What is new was the same on all ranks until now: it is its own base.
            self.base = self.weights.carry_over(before, self.base)

    def _register(self) -> None:
        """*Together.* Registers the buffers' memory with the group, if they are new."""
        # Not in `_make_room`, which a rank may reach alone in the middle of a round.
        if self._registered or self._group.size == 1:
            return
        self._registered = True
        self._memory.close()
        for buffer in self.weights.buffers:
            if not buffer.is_cuda:
                self._memory.enter_context(self._group.register(buffer))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"weights": list(self.weights.views)}
        if self.base is not None:
            state["base"] = [where.clone() for where in self.base]
        if self._compressor is not None:
            state["codec"] = self._compressor.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        weights = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if name in state["weights"]  # others may be frozen now than were when it was saved
        }
        self._make_room(weights, statistics_of(self._model))
        if "base" in state:
            self.base = [
                where.to(buffer.device, copy=True)
                for where, buffer in zip(state["base"], self.weights.buffers, strict=True)
            ]
        if self._compressor is not None:
            self._compressor.load_state_dict(state["codec"])


def _like(value: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`view`, as complex numbers where `value` is complex."""
    # Cloned: a place may begin at an odd element, where a complex number cannot.
    return torch.view_as_complex(view.clone()) if value.is_complex() else view


def _follow_ties(model: nn.Module, state: dict[str, Any]) -> None:
    """Copies the average of a tied tensor to its other names: it was averaged under the first."""
    first: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        known = first.setdefault(id(tensor), name)
        if known != name and name in state:
            state[name].copy_(state[known])
