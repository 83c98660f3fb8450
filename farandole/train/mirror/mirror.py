"""A strategy at work on weights that another framework trains.

    backward of the framework ─▶ gradients ─▶ one backward pass of torch's, in which nothing is
    computed: the strategy's hooks see it, as they see a pass over a pipeline ─▶ the gradients that
    the framework's optimizer applies ─▶ its new weights ─▶ the strategy's hooks after a step ─▶
    the weights that the framework goes on with

So averages, codecs, buckets, weights of uneven batches and checks of what is finite are those of
torch models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from farandole.comm import Group
from farandole.comm.tensors import kind_of
from farandole.errors import NotElasticError, UserError
from farandole.layout.pipeline.gradient_bridge import KnownGradients
from farandole.sync import Strategy
from farandole.sync.common.flat import Flat, statistics_of
from farandole.train.mirror.model import MirrorModel
from farandole.train.mirror.optimizer import MirrorOptimizer
from farandole.train.run import Run


class Mirror:
    """One model of another framework. All ranks call every method together.

    `fetch` is called before the weights are saved, and must call `load`. `give` is called after
    they were loaded from a checkpoint.
    """

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        trained: Mapping[str, torch.Tensor],
        *,
        frozen: Mapping[str, torch.Tensor] | None = None,
        statistics: Mapping[str, torch.Tensor] | None = None,
        slots: Mapping[str, torch.Tensor] | None = None,
        rate: float = 1.0,
    ) -> None:
        if run.group.units is not None:
            raise NotElasticError(
                "workers that come and go (--min) take a torch model's state from each other, and "
                "this model is not torch's. Leave out --min."
            )
        if not trained:
            raise UserError("the model has no weights that are trained. Build it first.")
        _require_one_dtype(slots or {}, next(iter(trained.values())))
        self.model = MirrorModel(trained, frozen or {}, statistics or {})
        self.optimizer = MirrorOptimizer(self.model.parameters(), slots or {}, rate)
        run.distribute(self.model, self.optimizer, sync=strategy)
        self._names = list(trained)
        self._weights = list(self.model.parameters())
        self._is_before = True  # the next step's hooks have not been called yet
        self._handed_out = -1  # all ranks have rank 0's weights now, and the script may not

    def gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients to apply for these: averages, where the strategy averages gradients.

        A gradient that is None on this rank counts as zeros, and so does one that is None on all.
        What is returned is valid until the next call. Raises `DivergedError` before a gradient is
        applied that is not finite.
        """
        known = self._checked(gradients)
        self._require_followed()
        for weight in self._weights:
            weight.grad = None
        with torch.enable_grad():
            KnownGradients.apply(known, *self._weights).backward()
        self._before()
        return [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in self._weights
        ]

    def step(
        self, values: Sequence[torch.Tensor], slots: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """A step was taken, and has led to these values, in the order of trained weights, frozen
        ones and statistics. `values` are those to go on with, if the weights have `moved`."""
        self._require_followed()
        self._before()
        self.load(values, slots)
        self.stepped()

    def stepped(self) -> None:
        """As `step`, where the strategy never changes a weight and need not see them."""
        self._before()
        self._is_before = True
        for weight in self._weights:
            weight.grad = None
        self.optimizer.after()

    def average_statistics(self, group: Group) -> None:
        """Of normalising layers. Strategies that average gradients keep each rank's own."""
        found = statistics_of(self.model)
        if found and group.size > 1:
            flat = Flat(found)
            flat.gather()
            for buffer in flat.buffers:
                group.all_reduce(buffer, "average")
            flat.scatter()

    @torch.no_grad()
    def load(
        self, values: Sequence[torch.Tensor], slots: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Takes the framework's values as they are now."""
        for mine, theirs in zip(self.model.values(), values, strict=True):
            mine.copy_(theirs)
        known = self.optimizer.slots
        for name, value in (slots or {}).items():
            known[name].copy_(value)
        self._handed_out = self._version

    def values(self) -> list[torch.Tensor]:
        self._handed_out = self._version
        return [value.detach() for value in self.model.values()]

    def slots(self) -> dict[str, torch.Tensor]:
        return self.optimizer.slots

    def follow_checkpoints(self, fetch: Callable[[], None], give: Callable[[], None]) -> None:
        """`fetch` is called before the state is saved, and `give` when one was loaded."""
        self.model.register_state_dict_pre_hook(lambda *_: fetch())
        self.optimizer.register_state_dict_pre_hook(lambda *_: fetch())
        self.model.register_load_state_dict_post_hook(lambda *_: give())
        self.optimizer.register_load_state_dict_post_hook(lambda *_: give())

    @property
    def _version(self) -> int:
        """Grows whenever somebody writes to a weight."""
        return sum(weight._version for weight in self._weights)

    @property
    def moved(self) -> bool:
        """Whether the weights have changed since `values` was called: the ranks have met."""
        return self._version != self._handed_out

    def _require_followed(self) -> None:
        """A step from weights of before would undo what the ranks have agreed on since."""
        if self.moved:
            raise UserError(
                "the ranks have agreed on weights, at the start, after an epoch, in a new phase "
                "of the strategy or by a checkpoint, and this step begins from others. Before each "
                "step write `if average.moved: params = average.params`."
            )

    def _before(self) -> None:
        if self._is_before:
            self._is_before = False
            self.optimizer.before()

    def _checked(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        if len(gradients) != len(self._weights):
            raise UserError(
                f"{len(gradients)} gradients were given for {len(self._weights)} trained weights."
            )
        known = []
        for name, weight, gradient in zip(self._names, self._weights, gradients, strict=True):
            if gradient is None:
                known.append(torch.zeros_like(weight))
                continue
            if gradient.shape != weight.shape:
                raise UserError(
                    f"the gradient of {name!r} is {tuple(gradient.shape)}, and the weight is "
                    f"{tuple(weight.shape)}."
                )
            known.append(gradient.to(dtype=weight.dtype, device=weight.device))
        return known


def _require_one_dtype(slots: Mapping[str, torch.Tensor], weight: torch.Tensor) -> None:
    """Torch casts an optimizer's state to its parameter's dtype when it is loaded."""
    for name, value in slots.items():
        if value.dtype != weight.dtype:
            raise UserError(
                f"the optimizer's state {name!r} is {kind_of(value.dtype)}, and the weights are "
                f"{kind_of(weight.dtype)}: strategies keep one dtype. Use the weights' for both."
            )
