"""The models that a run keeps in step, each with the synchronizer and the saver it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from farandole.comm import Group
from farandole.data import BatchInfo
from farandole.errors import UserError
from farandole.sync import Synchronizer
from farandole.sync.common.alignment import buffers_apart, require_in_step
from farandole.sync.common.finite_models import require_finite
from farandole.train.checkpoint.other_optimizers import OtherOptimizers
from farandole.train.checkpoint.saver import Saver

Note = dict[str, float | str]


class DistributedModels:
    """In the order in which they were given to `run.distribute`; checkpoints number them so.

    `steps` tells how many steps the run has taken: errors name the step.
    """

    def __init__(self, steps: Callable[[], int], *, check_finite: bool, check_in_step: bool):
        self.synchronizers: list[Synchronizer] = []
        self.savers: list[Saver] = []
        self.other_optimizers = OtherOptimizers(
            self.each, lambda: (saver.optimizer for saver in self.savers)
        )
        self._steps = steps
        self._checks_finite = check_finite
        self._checks_in_step = check_in_step

    def __len__(self) -> int:
        return len(self.synchronizers)

    def add(self, synchronizer: Synchronizer, saver: Saver) -> None:
        synchronizer.check_finite(self._checks_finite)
        if synchronizer.guard is not None:
            synchronizer.guard.count = synchronizer.guard.count or self._steps
        for known, its_saver in zip(self.synchronizers, self.savers, strict=True):
            if saver.optimizer is not None:
                known.work_beside(saver.optimizer)
            if its_saver.optimizer is not None:
                synchronizer.work_beside(its_saver.optimizer)
        self.synchronizers.append(synchronizer)
        self.savers.append(saver)
        self.other_optimizers.look_again()

    def each(self) -> Iterator[nn.Module]:
        return (known.model for known in self.synchronizers)

    def has(self, model: nn.Module) -> bool:
        return any(known is model for known in self.each())

    def synchronizer_of(self, model: nn.Module) -> Synchronizer:
        for known in self.synchronizers:
            if known.model is model:
                return known
        raise UserError("this model was not given to run.distribute.")

    @property
    def are_evaluated(self) -> bool:
        """Whether there are models, and all of them are in evaluation mode."""
        return bool(self.synchronizers) and not any(
            known.model.training for known in self.synchronizers
        )

    def begin_pass(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.begin_pass()

    def begin_step(self, info: BatchInfo, share_done: float | None) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.share_samples(info.readers)
            synchronizer.begin_step(info.weight, share_done, info.own_samples)

    def end_pass(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.end_pass()
        self.settle_guards()

    def settle_guards(self) -> None:
        """*Together.* What a GPU has found out about the last gradients is acted on."""
        for synchronizer in self.synchronizers:
            if synchronizer.guard is not None:
                synchronizer.guard.settle()

    def check_after_pass(self, group: Group, replicas: Group) -> None:
        """*Together.* Raises where a model is not finite, or not the same on all replicas."""
        if self._checks_finite:
            models = [known.model for known in self.synchronizers]
            require_finite(models, group, self._steps())
        if self._checks_in_step and replicas.size > 1:
            for synchronizer in self.synchronizers:
                if synchronizer.in_step_after_pass:
                    when = f"after {self._steps()} steps"
                    require_in_step(synchronizer.model, replicas, when)

    def buffers_apart(self, replicas: Group) -> list[str]:
        """*Together.* Names of buffers of which each replica has its own by now."""
        if not self._checks_in_step or replicas.size == 1:
            return []
        found = (buffers_apart(known.model, replicas) for known in self.synchronizers)
        return [name for names in found for name in names]

    def observe_loss(self, loss: float | torch.Tensor) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.observe_loss(loss)

    def hear(self, loss: float) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.hear(loss)

    def take_notes(self) -> Iterator[Note]:
        """What strategies have decided since the last time."""
        for synchronizer in self.synchronizers:
            yield from synchronizer.notes
            synchronizer.notes.clear()

    def close(self) -> None:
        self.other_optimizers.close()
        for synchronizer in self.synchronizers:
            synchronizer.close()
