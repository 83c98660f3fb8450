"""A model as a list of blocks: the smallest parts that a stage may consist of.

Each block takes one argument, what the block before it returned. All blocks in order are the model,
and they hold the model's own parameters and buffers, not copies. An `nn.Sequential` is such a list
already; so is a list of modules. Any other model is recorded: while it runs on a sample (see
`on_sample`), or without one by tracing it (see `tracing`). The first block takes what the model
takes.

A layer that works in place belongs to the block before it. As the first of a stage it would
overwrite what travelled, which autograd forbids and which a recomputation still needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from farandole.errors import UserError, nearest
from farandole.layout.arguments import Arguments
from farandole.layout.recording.on_sample import cut_on_sample
from farandole.layout.recording.tracing import traced


class Sample(NamedTuple):
    """What a model is recorded with, and how it will run."""

    arguments: Arguments
    device: torch.device = torch.device("cpu")
    precision: torch.dtype | None = None  # of what autocast lowers


class Block(NamedTuple):
    """A part of the model that is never cut. Its name is the one it has in the whole model."""

    name: str
    module: nn.Module


def blocks_of(
    model: nn.Module | Sequence[nn.Module],
    cuts: Sequence[str] = (),
    sample: Sample | None = None,
) -> list[Block]:
    """The blocks of a model, in order.

    Without `cuts` (an argument, or an attribute of the model: names of submodules) a block begins
    wherever a single value travels that has a gradient; with them, where these submodules are first
    called. What else is needed later travels along.

    `train()` and `eval()` of the blocks switch all that is in them. A traced block holds the
    model's own layers, but what the model's own `forward` does by `self.training` follows the
    block, not the model.

    Raises `UserError` if the model cannot be traced, has no blocks, or does not call a name in
    `cuts`.
    """
    cuts = tuple(cuts) or _declared(model)
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        if not _runs_in_order(model):
            found = traced(model, cuts) if sample is None else cut_on_sample(model, cuts, *sample)
            return [Block(name, module) for name, module in found]
        children: Iterable[tuple[str, nn.Module]] = model._modules.items()  # type: ignore[assignment]
    else:
        children = ((str(index), module) for index, module in enumerate(model))
    blocks = list(_flat(children))
    if not blocks:
        raise UserError("The model has no blocks: there is nothing to cut into stages.")
    if cuts:
        return list(_grouped(blocks, _beginnings(blocks, cuts)))
    begins = [index == 0 or not _in_place(block.module) for index, block in enumerate(blocks)]
    return list(_grouped(blocks, begins))


def _declared(model: object) -> tuple[str, ...]:
    cuts = getattr(model, "cuts", ())
    return tuple(cuts) if isinstance(cuts, (tuple, list)) else ()


def _runs_in_order(module: nn.Module) -> bool:
    """Whether calling it is calling its children in order, and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module).forward is nn.Sequential.forward and not hooks


def _flat(children: Iterable[tuple[str, nn.Module]], path: str = "") -> Iterator[Block]:
    # Not named_children(): it leaves out a module that comes a second time.
    for name, module in children:
        if not isinstance(module, nn.Module):
            raise UserError(
                f"Block {path}{name} of the model is a {type(module).__name__}, not an nn.Module."
            )
        if _runs_in_order(module):
            yield from _flat(module._modules.items(), f"{path}{name}.")  # type: ignore[arg-type]
        else:
            yield Block(path + name, module)


def _in_place(module: nn.Module) -> bool:
    return getattr(module, "inplace", False) is True


def _beginnings(blocks: Sequence[Block], cuts: Sequence[str]) -> list[bool]:
    """For each block, whether it is the first of the model or of a submodule in `cuts`."""
    begins = [index == 0 for index in range(len(blocks))]
    for cut in cuts:
        inside = [
            index for index, block in enumerate(blocks) if f"{block.name}.".startswith(f"{cut}.")
        ]
        if not inside:
            known = nearest(cut, [block.name for block in blocks])
            raise UserError(f"cuts: the model has no block {cut!r}. {known}")
        # The stage before would send a tensor that this block overwrites.
        if inside[0] and _in_place(blocks[inside[0]].module):
            raise UserError(
                f"cuts: {cut!r} works in place on what the block before it returned, so no block "
                f"can begin there. Cut before {blocks[inside[0] - 1].name!r}."
            )
        begins[inside[0]] = True
    return begins


def _grouped(blocks: Sequence[Block], begins: Sequence[bool]) -> Iterator[Block]:
    starts = [index for index, begin in enumerate(begins) if begin]
    for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True):
        name, module = blocks[start]
        if stop - start > 1:
            module = nn.Sequential(*(block.module for block in blocks[start:stop]))
        yield Block(name, module)
