"""Checks that all ranks hold the same model, and gives all of them rank 0's."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.errors import ModelMismatchError, UserError
from farandole.sync.common.flat import statistics_of

_DIGEST_BYTES = 16
_ROUNDING = 1e-3  # of the largest number in a tensor; far more than rounding does, less than a step


def check_same_model(model: nn.Module, group: Group) -> None:
    """Raises `ModelMismatchError`, on every rank, naming the first tensor that differs in kind."""
    for name, tensor in _tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise UserError(
                f"{name!r} has no shape yet: it belongs to a lazy layer. Pass a batch through the "
                "model before run.distribute."
            )
    mine = {
        name: [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for name, tensor in _tensors(model).items()
    }
    everyone = group.gather_json(mine)
    for rank, theirs in enumerate(everyone):
        if list(theirs.items()) == list(everyone[0].items()):  # the order counts too
            continue
        for name in [*everyone[0], *theirs]:
            ours, other = everyone[0].get(name), theirs.get(name)
            if ours != other:
                raise ModelMismatchError(
                    f"the ranks hold different models: {name!r} is {_kind(ours, other)} on rank 0 "
                    f"and {_kind(other, ours)} on rank {rank}. Build the same model on every rank."
                )
        raise ModelMismatchError(
            f"rank {rank} lists the model's tensors in another order than rank 0. Build the "
            "model's layers in the same order on every rank."
        )


def spread_from_first(model: nn.Module, optimizer: Optimizer | None, group: Group) -> None:
    """Gives every rank rank 0's parameters, buffers and optimizer state."""
    if group.size == 1:
        return
    group.broadcast_all(list(_tensors(model).values()))
    if optimizer is not None:
        _spread_optimizer(optimizer, group)


def _spread_optimizer(optimizer: Optimizer, group: Group) -> None:
    """Gives every rank rank 0's optimizer state; usually there is none yet."""
    # Structure travels as JSON and tensors as tensors, because nothing is unpickled. A rank whose
    # optimizer has no state yet makes empty tensors by the structure, and receives into them.
    state = optimizer.state_dict()
    outline = group.broadcast_json(_outline(state["state"]))
    options = group.broadcast_json(
        [{k: v for k, v in g.items() if _is_plain(v)} for g in state["param_groups"]]
    )
    for current, first in zip(state["param_groups"], options, strict=True):
        # A pair, such as Adam's betas, comes out of JSON as a list.
        current.update({k: tuple(v) if isinstance(v, list) else v for k, v in first.items()})
    own = state["state"]
    state["state"] = {
        int(index): {
            key: _slot(spec, own.get(int(index), {}).get(key), optimizer)
            for key, spec in entry.items()
        }
        for index, entry in outline.items()
    }
    values = pytree.tree_leaves(state["state"])
    group.broadcast_all([value for value in values if isinstance(value, torch.Tensor)])
    optimizer.load_state_dict(state)


def _outline(state: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(i): {k: _spec(v) for k, v in entry.items()} for i, entry in state.items()}


def _spec(value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        place = "cpu" if value.device.type == "cpu" else "device"
        return {"shape": list(value.shape), "dtype": str(value.dtype), "place": place}
    if isinstance(value, (list, tuple)):  # such as the history that L-BFGS keeps
        return {"items": [_spec(item) for item in value]}
    return {"value": value}


def _slot(spec: Mapping[str, Any], own: Any, optimizer: Optimizer) -> Any:
    """A value to receive rank 0's into: this rank's own tensor when it fits, else a new one."""
    if "value" in spec:
        return spec["value"]
    if "items" in spec:
        items = spec["items"]
        fits = isinstance(own, (list, tuple)) and len(own) == len(items)
        kept = own if fits else [None] * len(items)
        return [_slot(item, had, optimizer) for item, had in zip(items, kept, strict=True)]
    dtype = getattr(torch, spec["dtype"].removeprefix("torch."))
    if isinstance(own, torch.Tensor) and list(own.shape) == spec["shape"] and own.dtype == dtype:
        return own
    parameter = optimizer.param_groups[0]["params"][0]
    device = "cpu" if spec["place"] == "cpu" else parameter.device
    return torch.zeros(spec["shape"], dtype=dtype, device=device)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, float) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True)
class InStep:
    """Truthy when all ranks hold the same bytes; else `differing` names what differs where."""

    differing: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return not self.differing

    def __str__(self) -> str:
        if self:
            return "all ranks hold the same bytes"
        shown = ", ".join(f"{name} (ranks {list(ranks)})" for name, ranks in self.differing[:5])
        more = len(self.differing) - 5
        return f"differs from rank 0: {shown}" + (f" and {more} more" if more > 0 else "")


def in_step(model: nn.Module, group: Group) -> InStep:
    """*Together.* Compares every parameter and buffer of all ranks, by digest."""
    return tensors_in_step(_tensors(model), group)


def tensors_in_step(tensors: Mapping[str, torch.Tensor], group: Group) -> InStep:
    if not tensors:
        return InStep()
    mine = b"".join(_digest(tensor) for tensor in tensors.values())
    rows = group.all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    table = torch.stack(rows).view(len(rows), len(tensors), _DIGEST_BYTES)
    same = (table == table[0]).all(dim=2)
    return InStep(
        tuple(
            (name, tuple(rank for rank in range(len(rows)) if not same[rank, index]))
            for index, name in enumerate(tensors)
            if not same[:, index].all()
        )
    )


def buffers_apart(model: nn.Module, group: Group) -> list[str]:
    """*Together.* The buffers that differ between ranks, are saved, and that most strategies leave
    alone: all numbers but the statistics of normalising layers. Ranks may have different ones."""
    mine = {name: _digest(buffer).hex() for name, buffer in _own_buffers(model)}
    everyone = group.gather_json(mine)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    return [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]


def _own_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    averaged = statistics_of(model)
    for prefix, module in model.named_modules():
        # Vectors of spectral norms follow the weights by themselves.
        norms = [h.name for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
        vectors = {f"{name}_{which}" for name in norms for which in "uv"}
        for name, buffer in module.named_buffers(recurse=False):
            whole = f"{prefix}.{name}" if prefix else name
            is_plain = buffer.layout == torch.strided and not buffer.is_meta
            if (
                buffer.is_floating_point()
                and is_plain
                and whole not in averaged
                and name not in module._non_persistent_buffers_set | vectors
                and not isinstance(module, _SpectralNorm)
            ):
                yield whole, buffer


def require_in_step(model: nn.Module, group: Group, when: str) -> None:
    """Raises `ModelMismatchError` on all ranks if their parameters are not the same any more.

    Hosts with different processors round differently. What that adds up to is small, and
    only warned of. Buffers are not compared: BatchNorm's statistics may be a rank's own.
    """
    parameters = dict(model.named_parameters())
    found = tensors_in_step(parameters, group)
    if found:
        return
    # All ranks have the same table of digests, so all take part in the same collectives here.
    apart = max(_distance(parameters[name], group) for name, _ in found.differing)
    if apart <= _ROUNDING:
        if group.rank == 0:
            warnings.warn(
                f"{when} the parameters of the ranks differ by up to {apart:.1g} of their size, as "
                f"much as rounding may do where processors differ. ({found}.)",
                stacklevel=2,
            )
        return
    raise ModelMismatchError(
        f"{when} the ranks no longer hold the same model: {found}, by up to {apart:.2g} of its "
        "size. Something changes parameters on some ranks only: random numbers that differ, a step "
        "that a rank skips, a model or an optimizer other than those given to run.distribute. "
        "`run.check_in_step(model)` tells where they are apart; fd.init(check_in_step=False) "
        "leaves out this check."
    )


def _distance(tensor: torch.Tensor, group: Group) -> float:
    """The largest difference of any rank from rank 0, over the largest number there."""
    first = group.broadcast(tensor.detach().clone())
    apart = (tensor.detach() - first).abs().max().double()
    size = first.abs().max().double().clamp(min=torch.finfo(torch.float64).tiny)
    mine = (apart / size).nan_to_num(nan=math.inf).reshape(1)
    return float(group.all_reduce(mine, "max"))


def _digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(raw.numpy().data, digest_size=_DIGEST_BYTES).digest()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer once, by name: what must agree between ranks."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _kind(spec: Any, other: Any) -> str:
    if not spec:
        return "missing"
    if other and spec[:2] == other[:2]:
        return "trained" if spec[2] else "frozen"
    return f"{tuple(spec[0])} {spec[1].removeprefix('torch.')}"
