"""What a worker that joins gets from the others, in memory: all that a checkpoint would hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from farandole.comm import Group
from farandole.data import Loader
from farandole.errors import ModelMismatchError
from farandole.serialization.objects import dump, load
from farandole.sync.common.alignment import spread_from_first
from farandole.train.elastic.schedulers import load_scheduler_states, scheduler_states
from farandole.train.randomness import random_state, restore_random_state
from farandole.train.session import Session


def share_state(
    session: Session, loaders: Iterable[Loader], position: dict[str, Any], *, is_new: bool
) -> dict[str, Any]:
    """*Together.* Rank 0's state, for those that are new. Returns rank 0's `position`.

    Raises `ModelMismatchError` on a new worker whose model is another, and `CommError` when a rank
    is lost: then a new worker may hold parts of the state.
    """
    group = session.group
    head = _broadcast(group, _head(session, loaders, position) if group.rank == 0 else None)
    if is_new:
        _require_same(_described(session), head["models"])
    for synchronizer, optimizer in zip(
        session.models.synchronizers, session.optimizers, strict=True
    ):
        spread_from_first(synchronizer.model, optimizer, group)
    for synchronizer, order in zip(session.models.synchronizers, head["orders"], strict=True):
        synchronizer.regroup(order)
    if is_new:
        _take(session, loaders, head)
    found: dict[str, Any] = head["position"]
    return found


def _head(session: Session, loaders: Iterable[Loader], position: dict[str, Any]) -> dict[str, Any]:
    progress = session.progress
    return {
        "models": _described(session),
        "orders": [synchronizer.order for synchronizer in session.models.synchronizers],
        "progress": {
            "samples": progress.samples,
            "steps": progress.steps,
            "epoch": progress.epoch,
            "total_epochs": progress.total_epochs,
            "pass_ended": progress.pass_ended,
        },
        "seconds": progress.seconds,
        "loaders": [loader.state_dict() for loader in loaders],
        "random": random_state(session.device),
        "schedulers": scheduler_states(session.optimizers),
        "position": position,
    }


def _take(session: Session, loaders: Iterable[Loader], head: dict[str, Any]) -> None:
    progress = session.progress
    for name, value in head["progress"].items():
        setattr(progress, name, value)
    progress.go_on_from(head["seconds"])
    progress.resumed = True
    progress.loader_states = head["loaders"]
    for loader, state in zip(loaders, head["loaders"], strict=False):
        loader.load_state_dict(state)
    load_scheduler_states(session.optimizers, head["schedulers"])
    restore_random_state(head["random"], session.device)


def _broadcast(group: Group, value: Any) -> Any:
    """Rank 0's, on every rank."""
    data = dump(value) if group.rank == 0 else bytearray()
    length = group.broadcast(torch.tensor([len(data)]))
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if group.rank == 0:
        buffer.copy_(torch.frombuffer(data, dtype=torch.uint8))
    return load(group.broadcast(buffer).numpy().tobytes())


def _described(session: Session) -> list[dict[str, Any]]:
    """The kind of each tensor of each model."""
    return [
        {
            name: [list(tensor.shape), str(tensor.dtype)]
            for name, tensor in synchronizer.model.state_dict(keep_vars=True).items()
        }
        for synchronizer in session.models.synchronizers
    ]


def _require_same(own: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    if len(own) != len(others):
        raise ModelMismatchError(
            f"this worker, which joins, has {len(own)} models, and the others have {len(others)}: "
            "they do not run the same script."
        )
    for here, there in zip(own, others, strict=True):
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                raise ModelMismatchError(
                    f"this worker, which joins, has another model than the others: {name!r} is "
                    f"{here.get(name)} here, and {there.get(name)} there. Has the script changed?"
                )
