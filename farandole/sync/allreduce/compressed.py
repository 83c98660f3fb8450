"""Averages of gradients by a codec, which keeps what it leaves out for the next pass."""

from __future__ import annotations

import weakref
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

    What a codec leaves out of one pass it adds to the next. That would be wrong if the script threw
    away the gradients of the first: the generator's pass through a GAN's discriminator leaves such.
    So what it remembers of a pass is undone if no step has used it when the next pass begins anew.
    """

    def __init__(self, group: Group, compressor: Compressor, optimizer: Optimizer | None) -> None:
        self._group = group
        self._compressor = compressor
        self._wait = GradientWait(group.meter, group.trace)
        self._before: dict[str, Memory | None] = {}  # the last pass, while no step has used it
        self._is_used = True
        self._was_used = True  # the pass before the one under way
        self._knows_steps = False  # from the first one on: some wrappers call no hooks
        if optimizer is not None:
            me = weakref.ref(self)

            def stepped(_: Optimizer, args: Any, kwargs: Any) -> Any:
                reduction = me()
                return None if reduction is None else with_gradients(args, kwargs, reduction._use)

            optimizer.register_step_pre_hook(torch.compiler.disable(stepped))

    def _use(self) -> None:
        self._is_used = self._knows_steps = True
        self._before.clear()

    def reduce(self, bucket: Bucket) -> Pending:
        buffer = bucket.buffer
        follows = bucket.is_final and self._knows_steps
        if follows and bucket.index == 0:
            self._was_used, self._is_used = self._is_used, False
        is_thrown_away = follows and not self._was_used and _begins_anew(bucket)
        gradients = dict(zip(bucket.names, bucket.gradients, strict=True))  # views of the buffer
        self._wait.begin(buffer, bucket.is_last)

        def average() -> torch.Tensor:
            names = bucket.names
            if is_thrown_away:
                known = [name for name in names if name in self._before]
                self._compressor.put_back({name: self._before[name] for name in known})
            if follows:
                self._before.update(self._compressor.memories_of(names))
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


def _begins_anew(bucket: Bucket) -> bool:
    """Whether the script has removed the gradients that were handed out, so that these are new."""
    return not any(
        parameter.grad is view
        for parameter, view in zip(bucket.parameters, bucket.gradients, strict=True)
    )
