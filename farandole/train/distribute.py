"""`run.distribute`: a whole model on every rank, kept in step by a strategy."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from farandole.comm.gpu.cuda_graphs import refuse_capture
from farandole.errors import UserError
from farandole.layout import Layout
from farandole.sync import AllReduce, Strategy
from farandole.sync.common.foreign_parameters import ForeignParameters
from farandole.sync.common.wrappers import refuse_wrapped, refuse_wrapper_around
from farandole.system.activity import NO_ACTIVITY
from farandole.train.checkpoint.saver import WholeSaver
from farandole.train.compiling import NOTE, is_compiled
from farandole.train.elastic.support import require_elastic_model, require_elastic_strategy
from farandole.train.session import Session
from farandole.train.settings import check_writable


def distribute_whole(
    session: Session, model: nn.Module, optimizer: Optimizer | None, sync: Strategy | None
) -> nn.Module:
    """*Together.* Moves the model to this rank's device, and builds the strategy around it.

    The command line's strategy wins over `sync`. Raises `UserError` for what cannot be distributed
    as a whole, before anything is changed.
    """
    _require_kinds(model, optimizer)
    if session.rank == 0:
        check_writable(session.folder)
    if session.models.has(model):
        raise UserError("this model is distributed already; call run.distribute once for it.")
    if session.settings.layout not in (None, Layout()):
        raise UserError(
            f"--layout {session.settings.layout} cuts the model, and this script calls it whole. "
            "Let Farandole own the step: run.trainer(model, loss, make_optimizer)."
        )
    strategy = session.settings.sync or sync or AllReduce()
    if session.most_workers is not None:
        require_elastic_strategy(strategy)
        require_elastic_model(optimizer, len(session.models))
    refuse_wrapped(model)
    if is_compiled(model):
        session.print(NOTE)
    model = model.to(session.device)
    if optimizer is not None:
        _move_state(optimizer, session.device)
        session.optimizers.append(optimizer)
    if optimizer is not None and session.size > 1:
        # Before the hooks of the strategy, which would wait for the GPU in mid-capture.
        hook = torch.compiler.disable(_refuse_captured_step)  # it runs beside a compiled step
        optimizer.register_step_pre_hook(hook)
    session.strategy = strategy
    synchronizer = strategy.build(model, optimizer, session.group)
    saver = WholeSaver(synchronizer, optimizer, session.group)
    session.models.add(synchronizer, saver)
    if strategy.needs_servers and session.size > 1:
        session.models.other_optimizers.refuse_for(synchronizer.model)
    if session.size > 1:
        refuse_wrapper_around(synchronizer.model)
        # Servers keep whatever the optimizer has. Other strategies may say more of it themselves:
        # their hooks come before.
        if optimizer is not None and not strategy.needs_servers:
            foreign = ForeignParameters(optimizer, session.models.each)
            look = torch.compiler.disable(lambda *_: foreign.refuse())
            optimizer.register_step_pre_hook(look)
    if session.watch is not None:
        session.watch.follow(synchronizer.model, optimizer)
    activity = session.group.meter.activity
    if optimizer is not None and activity is not NO_ACTIVITY:
        optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: activity.step()))
    return synchronizer.model


def _require_kinds(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(
            f"run.distribute wants a model, a torch.nn.Module, and was given {_kind(model)}. Call "
            "it once for each model."
        )
    # A subclass that has not called its parent's __init__ has no hooks.
    is_whole = isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")
    if optimizer is not None and not is_whole:
        raise UserError(
            "run.distribute wants a torch.optim.Optimizer with its hooks, and was given "
            f"{_kind(optimizer)}. Of a wrapper, give the optimizer inside, and wrap it afterwards. "
            "Of several optimizers, give one, and the states of the others to "
            "run.save(other=other.state_dict())."
        )


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _refuse_captured_step(*_: object) -> None:
    refuse_capture("a step of an optimizer")


def _move_state(optimizer: Optimizer, device: torch.device) -> None:
    """State that was made before its parameters moved follows them."""
    for state in optimizer.state.values():
        for key, value in state.items():
            # Adam's step counter stays on the CPU unless it was made for the GPU.
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[key] = value.to(device)
