"""Averages of gradients by a codec, which keeps what it leaves out for the next pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.codecs import Compressor
from farandole.comm.codecs.compressor import Memory
from farandole.comm.meter import GradientWait
from farandole.sync.allreduce.buckets import Bucket
from farandole.sync.allreduce.reductions import Pending, Reduction, ending, settled
from farandole.sync.common.closures import with_gradients


class Compressed(Reduction):
    """Averages with a codec, which compresses each gradient by itself and knows it by its name.

    It does not compress whole buckets: buckets are packed anew after the first pass, and a resumed
    run must go on, to the bit, with the residual of each gradient.
    """

    def __init__(self, group: Group, compressor: Compressor) -> None:
        self._group = group
        self._compressor = compressor
        self._wait = GradientWait(group.meter, group.trace)
        self._unused: UnusedGradients | None = None

    def work_beside(self, own: Optimizer | None, other: Optimizer) -> None:
        """Another model is trained by `other`. It may leave gradients here that are thrown away."""
        if own is None:  # nobody says whether its gradients are used
            return
        if self._unused is None:
            unused = self._unused = UnusedGradients(self._compressor)

            @torch.compiler.disable  # a compiled step
            def stepping(_: Optimizer, args: Any, kwargs: Any) -> Any:
                return with_gradients(args, kwargs, unused.stepped)

            own.register_step_pre_hook(stepping)
        other.register_step_post_hook(torch.compiler.disable(self._unused.another_stepped))

    def reduce(self, bucket: Bucket) -> Pending:
        buffer = bucket.buffer
        gradients = dict(zip(bucket.names, bucket.gradients, strict=True))  # views of the buffer
        self._wait.begin(buffer, bucket.is_last)
        if self._unused is not None:
            self._unused.begin_pass(bucket)

        def average() -> torch.Tensor:
            # The flags are averaged first, and a gradient that no rank has is not sent. Compressing
            # its zeros would use up the residual that the codec keeps for it.
            self._group.all_reduce(bucket.trailer, "average")
            present = zip(gradients.items(), bucket.has_gradient.tolist(), strict=True)
            self._compressor.average({n: g for (n, g), flag in present if flag > 0}, self._group)
            return buffer

        if not bucket.is_last and not buffer.is_cuda:
            return ending(self._wait, self._group.start(average).future)
        # After the last bucket there is nothing left to overlap with, and an error is raised here
        # directly. On a GPU the work is asynchronous anyway, and must stay in its stream's order.
        with self._group.meter.counted_elsewhere():  # by `_wait`
            average()
        return ending(self._wait, settled(buffer))

    def state_dict(self) -> dict[str, Memory]:
        state = self._compressor.state_dict()
        return state if self._unused is None else self._unused.without_thrown_away(state)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        if self._unused is not None:
            self._unused.stepped()
        self._compressor.load_state_dict(state)


@dataclass
class _Unused:
    """Of a gradient that no step has used yet."""

    before: Memory | None  # what was remembered when it began
    gradient: torch.Tensor  # what was handed out
    version: int  # of the parameter
    other_steps: int


class UnusedGradients:
    """What a codec leaves out of gradients that the script throws away is thrown away with them.

    A generator's pass through a GAN's discriminator, say, leaves gradients in the discriminator:

        discriminator   pass step       pass         pass step
        generator                       pass step

    The codec would add what it has left out of the second pass to the third. Gradients count as
    thrown away if other ones take their place, no step has used them, and another optimizer has
    stepped meanwhile. The last tells a GAN from scripts that take gradients for themselves and add
    them up (PCGrad): there all of them count.
    """

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._gradients: dict[str, _Unused] = {}
        self._other_steps = 0

    def stepped(self) -> None:
        self._gradients.clear()

    def another_stepped(self, *_: object) -> None:
        self._other_steps += 1

    def begin_pass(self, bucket: Bucket) -> None:
        """Before the bucket's gradients are averaged."""
        rows = zip(bucket.names, bucket.parameters, bucket.gradients, strict=True)
        for name, parameter, view in rows:
            unused = self._gradients.get(name)
            if unused is None or parameter._version != unused.version:
                before = self._compressor.memory_of(name)
            else:
                before = unused.before
                if self._is_thrown_away(unused, parameter.grad):
                    self._compressor.put_back(name, before)
            self._gradients[name] = _Unused(before, view, parameter._version, self._other_steps)

    def without_thrown_away(self, state: dict[str, Memory]) -> dict[str, Memory]:
        """The compressor's state for a run that begins with it, and so without gradients."""
        for name, unused in self._gradients.items():
            if self._is_thrown_away(unused, None):
                state.pop(name, None)
                if unused.before is not None:
                    state[name] = dict(unused.before)
        return state

    def _is_thrown_away(self, unused: _Unused, now: torch.Tensor | None) -> bool:
        """`now`: the gradient that is there."""
        return self._other_steps > unused.other_steps and now is not unused.gradient
