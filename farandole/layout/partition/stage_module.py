"""A part of a model: the consecutive blocks of one stage, as a module that a rank can hold.

Random numbers in a block, such as dropout's, are drawn from a seed made of the run's seed, the
step, the micro-batch and the block. So they are the same however the model is cut, in whatever
order the micro-batches are computed, and when activations are computed again. Those of Python and
NumPy are seeded as torch's are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from farandole.layout.arguments import call
from farandole.layout.partition.blocks import Block
from farandole.layout.recording.state.random_states import RandomStates, set_seed


class PassId(NamedTuple):
    """Which forward pass this is, for the random numbers in it."""

    seed: int
    step: int
    micro: int

    def seed_of(self, block: int) -> int:
        # The same in every process: Python salts the hash of strings only, not that of integers.
        return hash((self.seed, self.step, self.micro, block)) & (2**63 - 1)


Rerun = Callable[[Callable[[Any], Any], Any, nn.Module, bool], Any]
"""Runs a function so that the backward pass runs it again, instead of keeping what it computed. Is
told which module it runs, and whether it will run again long from now, or soon: inside of another
that runs again."""


class StageModule(nn.Module):
    """Blocks `first` … of a model; called with what the block before them returned, or with the
    model's arguments."""

    def __init__(self, blocks: Sequence[Block], first: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block.module for block in blocks)
        self.block_names = [block.name for block in blocks]
        self.first = first
        self._draws: dict[tuple[bool, int], bool] = {}
        """Whether a block draws random numbers in training, and in evaluation; once it is known."""
        self.runs_again = False  # whether a backward pass runs it again: to draw the same then
        self.draws_alike = False  # whether other shards run it too, and must draw the same
        self._predictions = 0
        self.rerun: Rerun | None = None  # how blocks are run that are computed again, if they are
        self.rerun_blocks = 0  # at a time

    def forward(self, value: Any, pass_id: PassId | None = None) -> Any:
        count = len(self.blocks)
        if pass_id is None:
            pass_id = self._of_prediction()
        if self.rerun is None or pass_id is None or not self.training:
            return self._run(range(count), value, pass_id)
        for first in range(0, count, self.rerun_blocks):
            several = range(first, min(count, first + self.rerun_blocks))
            again = partial(self._again, several, pass_id=pass_id)
            value = self.rerun(again, value, self.blocks[first : several.stop], True)
        return value

    def _of_prediction(self) -> PassId | None:
        """The random state of this process may not be that of other shards."""
        self._predictions += 1
        return PassId(0, -self._predictions, 0) if self.draws_alike else None

    def _again(self, several: range, value: Any, pass_id: PassId) -> Any:
        """Blocks that are computed again. Of several, each is once more: so that when they are,
        only what comes into each is kept, and one block's activations at a time."""
        if len(several) == 1:
            return self._run(several, value, pass_id)
        assert self.rerun is not None
        for index in several:
            alone = partial(self._again, range(index, index + 1), pass_id=pass_id)
            value = self.rerun(alone, value, self.blocks[index : index + 1], False)
        return value

    def _run(self, several: range, value: Any, pass_id: PassId | None) -> Any:
        blocks, training = list(self.blocks), self.training
        for index in several:
            draws = self.runs_again or self._draws.get((training, index), True)
            if pass_id is None or not draws:
                value = call(blocks[index], value)
            else:
                value = self._drawing(index, value, pass_id.seed_of(self.first + index))
        return value

    def forget_draws(self) -> None:
        """What was seen under other random numbers does not count."""
        self._draws.clear()

    def _drawing(self, index: int, value: Any, seed: int) -> Any:
        """Runs a block with a random state of its own; the first time, sees if it needs one."""
        outside = RandomStates()
        set_seed(seed)
        key = self.training, index
        # Seeding and restoring takes longer than many small blocks do. So a block that did not draw
        # in its first pass is run without, unless it must draw the same a second time
        # (`runs_again`).
        inside = RandomStates() if key not in self._draws else None
        try:
            result = call(self.blocks[index], value)
            if inside is not None:
                self._draws[key] = inside != RandomStates()
        finally:
            outside.put_back()
        return result


def names_in(model: nn.Module, part: nn.Module) -> dict[str, str]:
    """For every tensor of `part`, by its name there, its first name in the whole model."""
    whole = {id(tensor): name for name, tensor in reversed(list(_tensors(model).items()))}
    mine = {name: whole.get(id(tensor)) for name, tensor in _tensors(part).items()}
    return {name: known for name, known in mine.items() if known is not None}


def shared_names(model: nn.Module) -> dict[str, str]:
    """For every name that a tensor has beside its first, that first name: tied weights."""
    first: dict[int, str] = {}
    return {
        name: first[id(tensor)]
        for name, tensor in _tensors(model).items()
        if first.setdefault(id(tensor), name) != name
    }


def release(model: nn.Module, kept: nn.Module) -> None:
    """Frees the memory of what other ranks hold. Whoever uses the model afterwards gets an error
    about shapes, and not results of weights that nobody trains."""
    mine = {id(tensor) for tensor in _tensors(kept).values()}
    for tensor in _tensors(model).values():
        if id(tensor) not in mine:
            # The tensor object stays, since optimizers and scripts may refer to it; only its memory
            # is freed.
            tensor.data = tensor.data.new_empty(0)


def _tensors(module: nn.Module) -> Mapping[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
