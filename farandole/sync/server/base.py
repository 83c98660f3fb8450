"""The common part of strategies that keep the model on parameter servers.

The memory of a push or a read belongs to the servers from its start until it is waited for: on the
same host they read and write it directly. So everything here that fills `outgoing` or empties
`incoming` has waited for what was under way in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm import Group
from farandole.errors import CheckpointError, UserError
from farandole.server.client.calls import Pending
from farandole.sync.base import Synchronizer
from farandole.sync.common.closures import with_gradients
from farandole.sync.common.flat import Flat, load_buffers, statistics_of
from farandole.sync.common.guard import GradientGuard, diverged
from farandole.sync.common.hooks import ForwardHook
from farandole.sync.common.weighing import Weighing
from farandole.sync.server.table import Connection, OptimizerState, ParameterTable, parts_of
from farandole.sync.server.untouched import Untouched, limited_weights


class ServerSynchronizer(Synchronizer):
    """Holds the connection and the tables. All ranks begin with rank 0's parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: Group) -> None:
        # By hand: gradients are checked where they lie side by side to be pushed, in one pass.
        self._guard = GradientGuard(model, optimizer, group, by_hand=True)
        super().__init__(model, Weighing(model), guard=self._guard)
        self._group = group
        self._optimizer = optimizer
        self._connection = Connection(group)
        self._store = self._connection.store
        self._store.show_waits(group.meter.activity)
        self._saw_forward = False
        model.register_forward_pre_hook(ForwardHook(self._before_forward))
        self._steps = 0
        # A rank that joins late must not take part in `_begin`: it is a collective, and the others
        # have long left it. It takes the servers' parameters and clock instead.
        self._begun = group.transport.joined_late
        self._must_catch_up = group.transport.joined_late
        self._pushes: list[Pending] = []
        self._reads: list[tuple[ParameterTable, Pending]] = []
        self._bytes = 0
        self._waited = 0.0
        self._parts = parts_of(model, optimizer, self._store)
        held = {name: p for part in self._parts for name, p in part.parameters.items()}
        self._limited = limited_weights(model)  # which change in a forward pass, and may
        self._untouched = Untouched({n: p for n, p in held.items() if p not in self._limited})
        for part in self._parts:
            self._create(part)
        self._offer()
        self._held = set(held.values())
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    @abstractmethod
    def _create(self, part: ParameterTable) -> None:
        """Creates the part's table on the servers."""

    @abstractmethod
    def _arrive(self) -> None:
        """Before each forward pass: takes in what was read."""

    @property
    def _pushes_changes(self) -> bool:
        """Whether what has happened to the parameters before a step is pushed with it."""
        return False

    @abstractmethod
    def _about_to_step(self) -> None: ...

    @abstractmethod
    def _stepped(self) -> None: ...

    def _before_forward(self) -> None:
        self._saw_forward = True
        self._arrive()

    def _after_step(self) -> None:
        self._untouched.note(None, self._steps)
        self._stepped()
        # A read that is under way writes where the values of the one before were.
        if self._reads or not self._untouched.has_values:
            self._untouched.note_step(self._steps)
        # A script that calls methods of its model, and never the model, has no forward hooks.
        if not self._saw_forward:
            self._arrive()
        self._saw_forward = False

    def _finish_reads(self) -> None:
        """Waits for all reads, and makes what they read the parameters."""
        if not self._reads:
            return
        self._untouched.require()
        for part, pending in self._reads:
            pending.wait()
            part.scatter()
        self._reads = []
        self._note_read()

    def _require_untouched(self, *, by_value: bool = False) -> None:
        # Before the first step a script may load weights, which then become the servers', or which
        # a rank that has joined late drops for theirs.
        if self._begun and not self._must_catch_up:
            self._untouched.require(by_value=by_value)

    def _note_read(self) -> None:
        """The parameters are what was read last, and nothing is under way there."""
        values = [
            value
            for part in self._parts
            for parameter, value in zip(part.parameters.values(), part.read_values(), strict=True)
            if parameter not in self._limited
        ]
        self._untouched.note(values, self._steps)

    def _have_arrived(self) -> bool:
        return all(pending.done() for _, pending in self._reads)

    def _finish_pushes(self) -> list[int]:
        """Waits until the servers have all pushes; returns the rounds that the tables are in."""
        pushes, self._pushes = self._pushes, []
        return [pending.wait() for pending in pushes]

    def _settle(self) -> None:
        """Waits until nothing of this rank is under way."""
        self._finish_pushes()
        self._finish_reads()

    def _pause(self) -> None:
        """Takes this rank out of the clocks until `_go_on`: nobody waits for it.

        Nothing of this rank is under way afterwards.
        """
        self._settle()

    def _go_on(self) -> None:
        """*Together.* Puts this rank back. The caller must pass a barrier before the next step."""

    def begin_step(self, weight: float, progress: float | None, samples: float) -> None:
        super().begin_step(weight, progress, samples)
        self._begin()
        self._count()
        if self._must_catch_up:
            self._must_catch_up = False
            self._catch_up()
            self._read_all()

    def _begin(self) -> None:
        """*Together.* Before the first step."""
        if not self._begun:
            self._begun = True
            self._offer_what_was_loaded()
            self._note_read()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        first = True

        def act() -> None:
            nonlocal first
            # A closure may be called more than once in a step (a line search does). What counts as
            # this step's gradient is that of the first call, at the parameters that were read.
            if first:
                first = False
                self._require_held()
                if not self._pushes_changes:
                    self._require_untouched()
                self._about_to_step()

        return with_gradients(args, kwargs, act)

    def _scaler_skips(self) -> bool:
        """Whether a GradScaler has left it to a fused optimizer to skip this step."""
        found = getattr(self._optimizer, "found_inf", None)
        return found is not None and bool(found)

    def _scale(self) -> float:
        """The factor by which a GradScaler leaves it to a fused optimizer to divide gradients."""
        scale = getattr(self._optimizer, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _require_finite(self, part: ParameterTable, what: str) -> None:
        """Raises `DivergedError` for a part that is about to be pushed and is not finite.

        The servers would refuse it too, but do not know the parameter's name.
        """
        culprit = part.first_not_finite() if self._guard.is_on else None
        if culprit is not None:
            raise diverged(self._group.rank, self._steps, f"{what} {culprit!r}")

    def _require_held(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                trained = parameter.grad is not None and parameter.numel()
                if trained and parameter not in self._held:
                    names = {p: name for name, p in self.model.named_parameters()}
                    raise UserError(
                        f"{names.get(parameter, 'a parameter')!r} has a gradient now, and was not "
                        "trained when run.distribute was called: the servers do not hold it. Give "
                        "all that is ever trained to the optimizer before, and freeze afterwards."
                    )

    def _catch_up(self) -> None:
        """For a rank that has joined late: sets its clock to that of the others."""

    def _count(self) -> None:
        """Adds the bytes sent to the servers, and the time waited for them, to the run's meter."""
        sent, waited = self._store.bytes_sent, self._store.waited_seconds
        self._group.meter.add_bytes(sent - self._bytes)
        self._group.meter.add_wait(waited - self._waited)
        self._bytes, self._waited = sent, waited

    def _offer(self) -> None:
        """*Together.* Rank 0's parameters become the servers', and everybody's."""
        if self._group.rank == 0:
            for part in self._parts:
                part.gather_weights()
                self._store.put(part.name, part.outgoing)
        self._group.barrier()
        self._read_all()
        self._group.barrier()  # nobody pushes before all have read

    def _offer_what_was_loaded(self) -> None:
        """*Together.* Puts a model that was loaded since `distribute` on the servers."""
        for part in self._parts:
            part.gather_weights()
        # `incoming` still holds what `_offer` has read. All ranks must agree: a script may load the
        # model on rank 0 only, and `_offer` is a collective.
        loaded = any(not torch.equal(part.outgoing, part.incoming) for part in self._parts)
        if any(self._group.gather_json(loaded)):
            self._offer()

    def _read_all(self) -> None:
        """Reads what the servers have now, without waiting for any worker's clock."""
        for part, pending in [(part, part.start_read()) for part in self._parts]:
            pending.wait()
            part.scatter()
        self._note_read()

    def _average_statistics(self) -> None:
        """Replaces BatchNorm's statistics by the average of all ranks'."""
        statistics = Flat(statistics_of(self.model))
        statistics.gather()
        for buffer in statistics.buffers:
            self._group.all_reduce(buffer, "average")
        statistics.scatter()

    def end_pass(self) -> None:
        super().end_pass()
        self._require_untouched(by_value=True)

    def whole_model(self) -> dict[str, Any]:
        self._require_untouched(by_value=True)
        # The model as a whole is the servers', and reading it overwrites this rank's parameters,
        # which may be ahead of it or behind. So they are copied and put back: saving must not
        # change how training goes on.
        self._pause()
        own = Flat({**dict(self.model.named_parameters()), **statistics_of(self.model)})
        own.gather()
        self._group.barrier()
        self._read_all()
        self._average_statistics()
        state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.model.state_dict().items()
        }
        self._go_on()
        self._group.barrier()  # nobody pushes before all have read
        own.scatter()
        # `incoming` holds the servers' model now. A change that workers push is counted from
        # `incoming`, so it must hold what this rank goes on from.
        for part in self._parts:
            part.count_as_read()
        self._note_read()
        return state

    def state_dict(self) -> dict[str, Any]:
        """This rank's state; on rank 0 that of the servers too. Comes after `whole_model`."""
        # `whole_model` has let all ranks pass a barrier with nothing under way, and the barrier
        # below keeps them from pushing before rank 0 has read the servers' slots.
        state: dict[str, Any] = {
            "steps": self._steps,
            "buffers": dict(self.model.named_buffers()),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        if self._group.rank == 0:
            state["servers"] = OptimizerState(self._store, self._parts).save()
        self._group.barrier()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._untouched.note(None, self._steps)  # the common model was loaded
        self._settle()
        self._group.barrier()
        servers = OptimizerState(self._store, self._parts)
        # Rank 0 alone has the servers' state; all ranks must raise, or none may.
        problem = servers.problem_with(state["servers"]) if self._group.rank == 0 else None
        problem = self._group.broadcast_json(problem)
        if problem is not None:
            raise CheckpointError(f"this checkpoint does not fit the script: {problem}.")
        if self._group.rank == 0:
            servers.load(state["servers"])
        # `_offer` sends the common model, which was loaded before, to the servers, and makes every
        # rank's parameters equal to it. This rank's own come afterwards.
        self._offer()
        self.model.load_state_dict(state["model"])
        load_buffers(self.model, state["buffers"])
        self._optimizer.load_state_dict(state["optimizer"])
        for part in self._parts:
            part.count_as_read()
        self._steps = state["steps"]
        self._begun = True
        self._note_read()

    def close(self) -> None:
        self._count()
        self._connection.close()
