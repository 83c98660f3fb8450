"""The plugin's functions, on the run of this process."""

from __future__ import annotations

from typing import Any

import torch

from farandole.cray.team import Team, TeamOptions, TeamStatistics
from farandole.cray.values import gradients_of, is_keras, parameters_of
from farandole.errors import UserError
from farandole.sync import AllReduce
from farandole.sync.common.alignment import tensors_in_step
from farandole.train.run import Run
from farandole.train.start import init as init_run


class _Plugin:
    run: Run | None = None
    teams: tuple[Team, ...] = ()


def init(teams: int = 1, **options: Any) -> Run:
    """Joins the job, and makes `teams` teams: each averages the gradients of one model.

    `options` are those of `fd.init`. Returns the run, for `run.loader`, `run.log` and the rest.
    """
    if _Plugin.run is not None:
        raise UserError("fd.cray.init() was called already.")
    if teams < 1:
        raise UserError(f"init: teams={teams} must be at least 1.")
    run = init_run(**options)
    asked = run.settings.sync
    if asked is not None and asked != AllReduce():
        raise UserError(
            f"--sync {asked}: fd.cray averages gradients. Give the model to run.distribute, which "
            "takes any strategy, in place of gradients(); or configure the pipelined mode with "
            "config_team."
        )
    # Each has connections of its own, so that a team's lagged averages do not hold up another's.
    groups = [run.group.subgroup(range(run.size)) for _ in range(teams)]
    _Plugin.run = run
    _Plugin.teams = tuple(Team(number, group) for number, group in enumerate(groups))
    run.other_loop.average_here()
    return run


def config_team(
    team: int = 0,
    *,
    first_k: int | None = None,
    max_steps: int | None = None,
    print_every: int = 0,
) -> None:
    """Configures a team. With `first_k`, the steps after the first k are pipelined: each applies
    the averages of the step before. So are none of the last k of `max_steps`."""
    last = None if first_k is None or max_steps is None else max(max_steps - max(first_k, 1), 0)
    _team(team).options = TeamOptions(first_k, last, print_every)


def get_rank() -> int:
    return _run().rank


def get_nranks() -> int:
    return _run().size


def barrier() -> None:
    """*Together.* Returns when every rank has called it."""
    _run().group.barrier()


@torch.no_grad()
def broadcast(given: Any, root: int = 0) -> Any:
    """*Together.* Gives all ranks the parameters of rank `root`, in place, and returns `given`.

    `given` is a torch or Keras model, or tensors or arrays that can be written.
    """
    found = parameters_of(given)
    if is_keras(given):
        from farandole.keras.weights import assign

        copies = [value.clone() for value in found.values()]
        _run().group.broadcast_all(copies, root)
        for variable, value in zip(given.variables, copies, strict=True):
            assign(variable, value)
        return given
    _run().group.broadcast_all([value.detach() for value in found.values()], root)
    return given


def check_buffers_match(given: Any, *, fix: bool = False) -> bool:
    """*Together.* Whether all ranks hold the same bytes; prints what differs.

    With `fix`, a mismatch is followed by a broadcast from rank 0.
    """
    run = _run()
    found = tensors_in_step(parameters_of(given), run.group)
    if not found:
        run.print(f"check_buffers_match: {found}")
        if fix:
            broadcast(given)
    return bool(found)


def gradients(given: Any, team: int = 0) -> Any:
    """*Together.* Averages gradients over all ranks, in place, between backward and step.

    `given` is a torch model, or its gradients as a list. Gradients of Keras models are averaged by
    `fd.keras.distribute`. Raises `UserError` for a parameter that has none.
    """
    if is_keras(given):
        raise UserError(
            "fit computes the gradients of a Keras model itself: write fd.keras.distribute(model) "
            "after compile, in place of gradients."
        )
    one = _team(team)
    one.average(gradients_of(given))
    if one.is_due:
        _show(one)
    return given


def average(value: float) -> float:
    """*Together.* The mean of a number over all ranks."""
    return _run().mean(float(value))


def statistics(team: int = 0) -> TeamStatistics:
    """Steps, seconds, seconds waited and bytes of a team, on this rank."""
    return _team(team).statistics


def finalize() -> None:
    """*Together.* Prints each team's statistics and ends the job's part in this process.

    Raises `UserError` if a pipelined team has averages that were never applied.
    """
    run = _run()
    try:
        for team in _Plugin.teams:
            if team.statistics.steps:
                _show(team)
            team.require_applied()
    finally:
        run.group.barrier()
        _Plugin.run, _Plugin.teams = None, ()
        run.close()


def _show(team: Team) -> None:
    found = team.statistics
    share = found.waited_seconds / max(found.seconds, 1e-9)
    _run().print(
        f"team {team.number}: {found.steps} steps in {found.seconds:.1f} s, "
        f"{found.waited_seconds:.2f} s ({share:.0%}) in averages of {found.bytes / 1e6:.1f} MB"
    )


def _run() -> Run:
    if _Plugin.run is None:
        raise UserError("call fd.cray.init() first.")
    return _Plugin.run


def _team(number: int) -> Team:
    _run()
    if not 0 <= number < len(_Plugin.teams):
        raise UserError(
            f"there is no team {number}: init(teams={number + 1}) makes it; there are "
            f"{len(_Plugin.teams)}."
        )
    return _Plugin.teams[number]
