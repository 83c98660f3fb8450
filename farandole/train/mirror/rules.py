"""Which strategies can keep weights in step that torch does not train."""

from __future__ import annotations

from farandole.errors import UserError
from farandole.layout import Layout
from farandole.sync import AllReduce, Strategy, parse
from farandole.train.settings import Settings


def read_strategy(
    settings: Settings, sync: Strategy | str | None, framework: str, *, slots: bool = True
) -> Strategy:
    """The command line's `--sync`, or `sync`, or all-reduce. Raises `UserError` for one that needs
    more of a model than its weights and gradients. `slots`: the optimizer's state is known."""
    if settings.layout not in (None, Layout()):
        raise UserError(
            f"--layout {settings.layout} cuts a torch model, and this one is {framework}'s. Leave "
            "out --layout."
        )
    given = parse(sync) if isinstance(sync, str) else sync
    strategy = settings.sync or given or AllReduce()
    why = _why_not(strategy, slots=slots)
    if why is not None:
        raise UserError(
            f"--sync {strategy} is not there for {framework}: {why}. Take allreduce, lagged, "
            "local, postlocal, adacomm, diloco, federated or daso."
        )
    return strategy


def _why_not(strategy: Strategy, *, slots: bool) -> str | None:
    if strategy.needs_servers or strategy.name in ("server", "downpour"):
        return "parameter servers apply the updates by rules of their own"
    if strategy.name == "hogwild":
        return "its workers share the memory of torch's parameters"
    if getattr(strategy, "batchnorm", "local") == "sync":
        return "batchnorm=sync replaces layers of a torch model"
    moments = getattr(strategy, "moments", "keep")
    if moments == "reset":
        return "moments=reset would have to reset counters of its optimizer too"
    if (moments == "average" or strategy.name == "daso") and not slots:
        what = "daso" if strategy.name == "daso" else "moments=average"
        return f"{what} averages the state of the optimizer too, and none was given (state=…)"
    return None
