"""Stops before gradients that are not finite are applied, and names the rank they came from.

One rule for all strategies: no optimizer's step is taken with a NaN or an infinity in a gradient.
What is looked at is what the step would apply, after averages, accumulation and the script's own
clipping.

After an average all ranks hold the same NaN and find it in the same step, without communication.
The notes of the buckets say whose it was. A rank that trains alone for a while must not stop alone,
because the others would wait for it: there the strategy decides what happens (`act`).

The check does not wait for a GPU: see `device_check`. A gradient scaler produces infinities on
purpose and skips the step; steps that it skips are not checked here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.gpu.cuda_graphs import is_captured
from farandole.comm.tensors import is_finite
from farandole.errors import DivergedError
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.allreduce.reducer import GradientReducer
from farandole.sync.common.closures import with_gradients
from farandole.sync.common.device_check import DeviceCheck, DeviceChecks
from farandole.sync.common.present_gradients import PresentGradients

UNTOUCHED = "No parameter has been changed by it."
SKIPPED = "Its step was taken with zeros instead of gradients."
KEPT_BACK = "Nothing of it has reached the other ranks."

_SHOWN = 3


class Culprit(NamedTuple):
    """What is not finite, and where it was found."""

    rank: int
    step: int
    what: str
    outcome: str = UNTOUCHED

    @property
    def error(self) -> DivergedError:
        return diverged(*self)


class GradientGuard:
    """Looks at the gradients of one model before each step of its optimizer.

    `reducer` averages the gradients, if anything does. `act` is called with what is not finite, and
    raises by default. With `by_hand` the strategy calls `look` itself.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        group: Group,
        reducer: GradientReducer | None = None,
        act: Callable[[Culprit], None] | None = None,
        *,
        by_hand: bool = False,
    ) -> None:
        self.is_on = True
        self.reducer = reducer
        self.ranks: Sequence[int] = range(group.size)
        """The numbers of the group's ranks in the world."""
        self.peers: Group | None = None
        """Further ranks that take each step together with this one: the stages of a pipeline."""
        self.count: Callable[[], int] | None = None
        """Returns the number of the step. None, or a count of 0: the guard counts itself."""
        self.name_of: Callable[[str], str] = str
        """The name of a parameter, where it is known by another one outside."""
        self._model = model
        self._optimizer = optimizer
        self._group = group
        self._act = act or stop
        self._steps = 0
        self._known_buckets: Sequence[Bucket] = ()
        self._begins: list[int] = []  # of their buffers
        self._buffers: dict[int, torch.Tensor] = {}  # of those, by the address of each gradient
        self._present = PresentGradients()
        self._device_checks = DeviceChecks()
        self._started: _Started | None = None
        if optimizer is not None and not by_hand:
            # Weak: an optimizer that outlives its strategy must not keep it, nor be checked by it.
            me = weakref.ref(self)
            hook = torch.compiler.disable(_before)  # it runs beside a compiled step
            optimizer.register_step_pre_hook(lambda _, args, kwargs: hook(me, args, kwargs))

    @property
    def rank(self) -> int:
        return self.ranks[self._group.rank]

    def before_step(self, args: Any, kwargs: Any) -> Any:
        """Returns what a hook before an optimizer's step must return."""
        if not self.is_on:
            return None
        self._steps += 1
        return with_gradients(args, kwargs, self.look)

    def look(self) -> None:
        """Acts on a gradient of this rank that is not finite; with peers, on one of any of them."""
        self._decide(None if _has_scaler(self._optimizer) else self._find())

    def settle(self) -> None:
        """*Together.* Acts on what a GPU has found in the last step."""
        # Without this the last step before a save or the end of a pass would go unchecked: its
        # result is read before the next step, and there is none.
        if self.is_on:
            self._decide(self._read())

    def _decide(self, found: Culprit | None) -> None:
        # The stages of a pipeline hold different parameters. One that stopped alone would leave the
        # others waiting in the next step, so all of them decide together, in every step.
        if self.peers is not None:
            found = _first_of(self.peers, found)
        if found is not None:
            self._act(found)

    def withhold(self) -> None:
        """Makes the step that is about to be taken change nothing."""
        for parameter in self._parameters():
            parameter.grad = None

    # One look

    def _find(self) -> Culprit | None:
        if is_captured():  # a replay runs without this, and a capture must not be waited in
            return None
        found = self._read()  # of the step before, on a GPU
        if found is not None:
            return found
        on_cpu, on_device = self._present.find(self._parameters())
        step = (self.count() if self.count is not None else 0) or self._steps
        # Two passes: over few large buffers first, which are nearly always finite. A buffer holds
        # more than these gradients (flags, notes, other parameters), so the second pass decides.
        if on_cpu.gradients and not all(map(is_finite, self._flats(on_cpu.gradients))):
            pairs = zip(on_cpu.parameters, on_cpu.gradients, strict=True)
            bad = next((p for p, g in pairs if not is_finite(g)), None)
            if bad is not None:
                noted = [(bucket, bucket.noted()) for bucket in self._buckets()]
                return self._blame(bad, noted, step, UNTOUCHED)
        gradients = on_device.gradients
        if gradients:
            check = self._device_checks.start(
                gradients, lambda: self._flats(gradients), self._buckets(), on_device.kinds
            )
            self._started = _Started(check, on_device.parameters, step)
        return None

    def _read(self) -> Culprit | None:
        started, self._started = self._started, None
        bad = None if started is None else started.check.first_bad()
        if started is None or bad is None:
            return None
        noted = started.check.noted()
        return self._blame(started.parameters[bad], noted, started.step, SKIPPED)

    def _parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters, roughly in the order in which a backward pass reaches them.

        So the first that is not finite is nearest to the cause.
        """
        assert self._optimizer is not None
        return [p for group in self._optimizer.param_groups for p in group["params"]][::-1]

    def _buckets(self) -> Sequence[Bucket]:
        return () if self.reducer is None else self.reducer.handed_out

    def _flats(self, gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Few tensors that hold all gradients: the buckets where gradients still lie in them."""
        buckets = self._buckets()
        if not buckets:
            return list(gradients)
        # By address: the script may have set `grad.data`, and a bucket's view lies elsewhere then.
        begins = [bucket.buffer.data_ptr() for bucket in buckets]
        if begins != self._begins or buckets is not self._known_buckets:
            self._begins, self._known_buckets = begins, buckets
            self._buffers = {
                begin + offset: bucket.buffer
                for begin, bucket in zip(begins, buckets, strict=True)
                for offset in bucket.offsets
            }
        buffers = self._buffers
        flats = [buffers.get(gradient.data_ptr(), gradient) for gradient in gradients]
        return list({id(flat): flat for flat in flats}.values())

    def _blame(
        self,
        bad: nn.Parameter,
        noted: Sequence[tuple[Bucket, Sequence[int]]],
        step: int,
        outcome: str,
    ) -> Culprit:
        """Names the rank and the parameter. `bad` has a gradient that is not finite."""
        # The notes come before `bad`: clipping by the norm spreads a NaN to all gradients, while
        # the notes were written before anything could spread.
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        name = names.get(bad, "a parameter of another model")
        for bucket, ranks in noted:
            if ranks:
                held = [name] if name in bucket.names else bucket.names
                what = f"its gradient of {self._shown(held)}"
                if len(ranks) > 1:  # a layer may spread it, such as BatchNorm over all ranks
                    others = ", ".join(str(self.ranks[rank]) for rank in ranks[1 : _SHOWN + 1])
                    what += f" (like those of ranks {others}{', …' * (len(ranks) > _SHOWN + 1)})"
                return Culprit(self.ranks[ranks[0]], step, what, outcome)
        owner = "the average" if noted else "its gradient"
        return Culprit(self.rank, step, f"{owner} of {self._shown([name])}", outcome)

    def _shown(self, names: Sequence[str]) -> str:
        known = [repr(self.name_of(name)) for name in names[:_SHOWN]]
        if len(names) == 1:
            return known[0]
        return f"one of {', '.join(known)}" + (", …" if len(names) > _SHOWN else "")


class _Started(NamedTuple):
    """A check on a device that nobody has read yet."""

    check: DeviceCheck
    parameters: Sequence[nn.Parameter]
    step: int


def stop(found: Culprit) -> None:
    raise found.error


def diverged(rank: int, step: int, what: str, outcome: str = KEPT_BACK) -> DivergedError:
    return DivergedError(
        f"rank {rank}, step {step}: {what} is not finite. {outcome} Lower the learning rate, clip "
        "the gradients, or look at that rank's data. (`farandole run --no-check-finite` or "
        "fd.init(check_finite=False) goes on regardless.)"
    )


def _before(me: weakref.ref[GradientGuard], args: Any, kwargs: Any) -> Any:
    guard = me()
    return None if guard is None else guard.before_step(args, kwargs)


def _has_scaler(optimizer: Optimizer | None) -> bool:
    """A GradScaler has left it to a fused optimizer to skip the step."""
    return getattr(optimizer, "found_inf", None) is not None


def _first_of(group: Group, found: Culprit | None) -> Culprit | None:
    """*Together.* What the first rank of a group has found that has found anything."""
    anything = group.all_reduce(torch.tensor(0.0 if found is None else 1.0), "max")
    if not anything:
        return None
    return next(Culprit(*one) for one in group.gather_json(found) if one is not None)
