"""A model on parameter servers: its trained parameters, side by side in tables.

One table for each group of the optimizer and each dtype, so that one push and one read move
everything. The buffers lie in memory that a server of the same host sees too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.comm.tensors import is_finite
from farandole.errors import UserError
from farandole.server.client.calls import Pending
from farandole.server.client.store import Store
from farandole.server.cluster import Cluster
from farandole.server.registrar.transport import RegistrarTransport
from farandole.server.rules import parse_rule
from farandole.server.tables import DTYPES
from farandole.sync.server.staging import staging_of


class Connection:
    """The store that a strategy uses: the job's servers, or one that rank 0 runs in a thread."""

    def __init__(self, group: Group) -> None:
        self._cluster: Cluster | None = None
        self._owns_store = not isinstance(group.transport, RegistrarTransport)
        if isinstance(group.transport, RegistrarTransport):
            self.store = group.transport.lend_store()
            return
        if len(group.topology.hosts) > 1:
            raise UserError(
                f"the workers are on {len(group.topology.hosts)} hosts, and no parameter servers "
                "were named. Start them with `farandole server --bind …`, and the job with "
                "`farandole run --servers tcp://… --key-file …`."
            )
        if group.rank == 0:
            self._cluster = Cluster(in_threads=True, workers=group.size)
            self._cluster.__enter__()
        where = [self._cluster.address, str(self._cluster.key_file)] if self._cluster else None
        address, key_file = group.broadcast_json(where)
        seconds = group.timeout.total_seconds()
        self.store = Store(address, key_file, rank=group.rank, timeout=seconds)

    def close(self) -> None:
        if self._owns_store:
            self.store.close()
        if self._cluster is not None:
            self._cluster.close()


class ParameterTable:
    """The parameters of one optimizer group and one dtype, as one dense table."""

    def __init__(
        self,
        name: str,
        parameters: dict[str, nn.Parameter],
        optimizer: Optimizer,
        group: int,
        store: Store,
    ) -> None:
        self.name = name
        self._optimizer = optimizer
        self._group = group
        self.parameters = parameters
        self._store = store
        real = [_real(parameter.detach()) for parameter in parameters.values()]
        self.count = sum(tensor.numel() for tensor in real)
        self.dtype = real[0].dtype
        # Two buffers, so that a push and the read that follows it can be under way at once.
        self.outgoing = store.buffer(self.count, self.dtype)
        self.incoming = store.buffer(self.count, self.dtype)
        self._out_views = _views(self.outgoing, real)
        self._in_views = _views(self.incoming, real)
        self._staging = staging_of(real)

    @property
    def settings(self) -> dict[str, Any]:
        """The optimizer's group of options, such as the rate."""
        # Looked up each time: `load_state_dict` replaces the optimizer's groups by new dicts.
        return self._optimizer.param_groups[self._group]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def tensors(self) -> list[torch.Tensor]:
        return [_real(parameter.detach()) for parameter in self.parameters.values()]

    @torch.no_grad()
    def gather_gradients(self, scale: float = 1.0) -> None:
        """Into `outgoing`, divided by `scale`. A parameter without a gradient counts as zeros."""
        found = [
            None if p.grad is None else _real(_dense(p.grad)) for p in self.parameters.values()
        ]
        if self._staging is not None:
            self._staging.take(found, self.outgoing)
        else:
            self._copy_out(found)
        if scale != 1.0:
            self.outgoing.div_(scale)

    def _copy_out(self, found: Sequence[torch.Tensor | None]) -> None:
        if any(tensor is None for tensor in found):
            self.outgoing.zero_()
        pairs = [(v, t) for v, t in zip(self._out_views, found, strict=True) if t is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [tensor for _, tensor in pairs])

    @torch.no_grad()
    def gather_weights(self) -> None:
        if self._staging is not None:
            self._staging.take(self.tensors(), self.outgoing)
        else:
            torch._foreach_copy_(self._out_views, self.tensors())

    @torch.no_grad()
    def gather_change(self, share: float) -> None:
        """Into `outgoing`: what the parameters moved by since they were read, times `share`."""
        self.gather_weights()
        self.outgoing.sub_(self.incoming).mul_(share)

    @torch.no_grad()
    def scatter(self) -> None:
        """Makes what was read the parameters."""
        if self._staging is not None:
            self._staging.give(self.incoming, self.tensors())
        else:
            torch._foreach_copy_(self.tensors(), self._in_views)

    @torch.no_grad()
    def count_as_read(self) -> None:
        """Takes the parameters as they are for what was read: changes are counted from here."""
        if self._staging is not None:
            self._staging.take(self.tensors(), self.incoming)
        else:
            torch._foreach_copy_(self._in_views, self.tensors())

    def read_values(self) -> list[torch.Tensor]:
        """What was read last, in the order of the parameters. A read under way writes into it."""
        return self._in_views

    def first_not_finite(self) -> str | None:
        if is_finite(self.outgoing):
            return None
        pairs = zip(self.parameters, self._out_views, strict=True)
        return next((name for name, view in pairs if not is_finite(view)), None)

    def start_read(self, **needs: Any) -> Pending:
        return self._store.start_get(self.name, out=self.incoming, **needs)


def parts_of(model: nn.Module, optimizer: Optimizer, store: Store) -> list[ParameterTable]:
    """Tables for all parameters that the optimizer trains, in the same order on all ranks.

    Raises `UserError` for what no table can hold.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = []
    for index, group in enumerate(optimizer.param_groups):
        kinds: dict[torch.dtype, dict[str, nn.Parameter]] = {}
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.numel():
                name = names.get(parameter, f"parameter {place} of group {index}")
                kinds.setdefault(_real(parameter.detach()).dtype, {})[name] = parameter
        for dtype, parameters in kinds.items():
            short = str(dtype).removeprefix("torch.")
            if short not in DTYPES:
                raise UserError(f"{next(iter(parameters))!r} is of {dtype}; tables hold {DTYPES}.")
            table = store.own_name(f"model {index} {short}")
            parts.append(ParameterTable(table, parameters, optimizer, index, store))
    if not parts:
        raise UserError("the optimizer trains nothing: none of its parameters requires a gradient.")
    return parts


class OptimizerState:
    """Saves and restores what the servers' rules remember, such as moments."""

    def __init__(self, store: Store, parts: Sequence[ParameterTable]) -> None:
        self._store = store
        self._parts = parts

    def save(self) -> list[dict[str, Any]]:
        saved = []
        for part in self._parts:
            slots = parse_rule(self._store.table(part.name).rule).slots
            values = [
                self._store.start_get(part.name, slot=number + 1).wait().view(-1)
                for number in range(len(slots))
            ]
            rule = self._store.table(part.name).rule
            saved.append({"steps": self._store.updates(part.name), "slots": values, "rule": rule})
        return saved

    def problem_with(self, saved: Sequence[dict[str, Any]]) -> str | None:
        """Why this is not the state of these rules; None if it is."""
        if len(saved) != len(self._parts):
            return f"the servers held {len(saved)} tables, and hold {len(self._parts)} now"
        for part, state in zip(self._parts, saved, strict=True):
            rule = self._store.table(part.name).rule
            before = state.get("rule")  # which was not always said
            slots = len(parse_rule(rule).slots)
            if before not in (None, rule) or len(state["slots"]) != slots:
                return (
                    f"the servers' rule was {before or 'another one'!r} with "
                    f"{len(state['slots'])} states, and is {rule!r} with {slots} now. It comes "
                    "from the optimizer and its options at run.distribute: write those again"
                )
        return None

    def load(self, saved: Sequence[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, saved, strict=True):
            for number, values in enumerate(state["slots"]):
                self._store.start_put(part.name, values, slot=number + 1).wait()
            self._store.set_updates(part.name, state["steps"])


def _views(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _dense(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.to_dense() if gradient.is_sparse else gradient
