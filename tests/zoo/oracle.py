"""Holds a model under a layout against the plain model: exact, refused, wrong or crashed.

Three steps of SGD with momentum, in double precision, without the self-check: what it would catch
must be right or refused already. Losses, weights, buffers and predictions are compared; the first
prediction comes between two steps, so that the model is switched to evaluation and back.

Two things differ by design, and are compared with what the documentation says of them.
Micro-batches are normalised by their own statistics, so the plain model is run in the same
micro-batches. Random numbers are seeded otherwise than in one process, so draws are replaced by
their expected values on both sides.
"""

from __future__ import annotations

import contextlib
import copy
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from farandole import FarandoleError, InexactError, StageError, UserError
from farandole.layout import parse_layout
from farandole.layout.arguments import arguments_of, call
from farandole.layout.pipeline.micro import cut_batch
from farandole.layout.self_check.draws import ExpectedDraws
from farandole.testing import run_world
from farandole.train import Run
from tests.zoo.registry import Case

ROWS = (4, 6, 4)  # samples of each step
TOLERANCE = 1e-7  # of the largest number in a tensor; a wrong result is off by far more
LIMIT = timedelta(seconds=120)

NORMS = ("running_mean", "running_var", "num_batches_tracked")

EXACT, REFUSED, WRONG, CRASHED = "exact", "refused", "WRONG", "crash"


class Verdict(NamedTuple):
    kind: str
    why: str = ""  # the refusal, or what differs


class Outcome(NamedTuple):
    losses: list[float]
    predictions: list[Any]  # after the first step, and after the last
    state: dict[str, Tensor]


class _AfterStepsError(Exception):
    """Whatever comes after the first step is no refusal."""


def model_of(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return case.build().double()


def batches_of(case: Case) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(5)
    return [(case.inputs(rows, generator), case.targets(rows, generator)) for rows in ROWS]


def optimizer_of(weights: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.02, momentum=0.9, weight_decay=0.01)


def draws(case: Case) -> contextlib.AbstractContextManager[Any]:
    return ExpectedDraws() if case.draws else contextlib.nullcontext()


def plain(case: Case, microbatches: int) -> Outcome:
    """The loop that everybody writes, one micro-batch after the other."""
    model = model_of(case)
    optimizer = optimizer_of(model.parameters())
    losses, predictions = [], []
    batches = batches_of(case)
    with draws(case):
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            total = 0.0
            for micro in cut_batch(x, y, microbatches, "mean"):
                loss = case.loss(call(model, arguments_of(micro.inputs)), micro.targets)
                (loss * micro.weight).backward()
                total += loss.item() * micro.weight
            optimizer.step()
            losses.append(total)
            if step != 1:
                predictions.append(_predicted(model, x, y, microbatches))
    return Outcome(losses, predictions, _state(model))


def _predicted(model: nn.Module, x: Any, y: Any, microbatches: int) -> Any:
    """Micro-batches put together; of the whole batch, where a number of the output is."""
    micros = cut_batch(x, y, microbatches, "mean")
    model.eval()
    with torch.no_grad():
        found = [call(model, arguments_of(micro.inputs)) for micro in micros]
        if any(leaf.dim() == 0 for leaf in pytree.tree_leaves(found)):
            found = [call(model, arguments_of(x))]
    model.train()
    leaves = [pytree.tree_leaves(each) for each in found]
    joined = [
        parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*leaves, strict=True)
    ]
    return pytree.tree_unflatten(joined, pytree.tree_structure(found[0]))


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.detach().clone() for name, value in model.state_dict().items() if value.numel()
    }


_plain = lru_cache(maxsize=4)(plain)


def verdict(case: Case, text: str, *, sample: bool = False) -> Verdict:
    """Of training this model under the layout `text`. `sample`: whether it is recorded with one."""
    layout = parse_layout(text)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        expected = _plain(case, layout.microbatches)
        try:
            if case.changes:
                _refused_for_changes(case, layout, sample, Path(folder))
            ranks = _trained(case, layout, sample, Path(folder), batches_of(case))
        except _AfterStepsError as error:
            return Verdict(CRASHED, f"after the first step: {error}")
        except FarandoleError as error:
            kind = REFUSED if _is_refusal(error) else CRASHED
            return Verdict(kind, f"{type(error).__name__}: {error}")
        except Exception as error:
            return Verdict(CRASHED, f"{type(error).__name__}: {error}")
    difference = _difference(ranks, expected, averaged=layout.schedule == "gems")
    return Verdict(WRONG, difference) if difference else Verdict(EXACT)


def _is_refusal(error: FarandoleError) -> bool:
    """Raised on purpose: not a stage that failed with an error of Python's or torch's."""
    if isinstance(error, StageError):
        return re.search(r": [A-Z]\w*(Error|Exception|Iteration): ", str(error)) is None
    return isinstance(error, UserError | InexactError)


def _refused_for_changes(case: Case, layout: Any, sample: bool, folder: Path) -> None:
    """Raises what the first step says of a forward that changes something. Without a check it
    trains as it is; so it is checked, and what the check itself finds out does not count."""
    try:
        _trained(case, layout, sample, folder, batches_of(case)[:1], check=True)
    except InexactError as error:
        if "forward changes" in str(error):
            raise


def _trained(
    case: Case,
    layout: Any,
    sample: bool,
    folder: Path,
    batches: list[tuple[Any, Any]],
    *,
    check: bool = False,
) -> list[Outcome]:
    models = [model_of(case) for _ in range(layout.ranks)]
    sample = sample or isinstance(batches[0][0], tuple)  # else a model has one argument

    def body(run: Run) -> Outcome:
        model = models[run.rank]
        trainer = run.trainer(
            model,
            case.loss,
            optimizer_of,
            layout=layout,
            sample=copy.deepcopy(batches[0][0]) if sample else None,
            check=check,
        )
        run.group.barrier()  # torch.fx traces for all threads: nobody runs a model meanwhile
        losses: list[float] = []
        predictions = []
        try:
            with draws(case):
                for step, (x, y) in enumerate(batches):
                    losses.append(float(trainer.step(x, y)))
                    if step != 1:
                        predictions.append(trainer.predict(x))
        except Exception as error:
            if losses:
                raise _AfterStepsError(f"{type(error).__name__}: {error}") from error
            raise
        return Outcome(losses, predictions, _state(model))

    return run_world(layout.ranks, body, folder=folder, timeout=LIMIT)


def _difference(ranks: Sequence[Outcome], expected: Outcome, averaged: bool) -> str:
    """What differs first, or nothing. `averaged`: two directions average running statistics."""
    norms = {name for name in expected.state if name.rpartition(".")[2] in NORMS}
    norms = norms if averaged else set()
    if {name for found in ranks for name in found.state} != set(expected.state):
        return "the names of weights and buffers"
    for rank, found in enumerate(ranks):
        for step, (ours, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
            if abs(ours - theirs) > TOLERANCE * max(1.0, abs(theirs)):
                return f"the loss of step {step} on rank {rank}: {ours}, and not {theirs}"
        for name in found.state.keys() - norms:
            if not _close(found.state[name], expected.state[name]):
                return f"{name} on rank {rank}"
        for index, (mine, whole) in enumerate(
            zip(found.predictions, expected.predictions, strict=True)
        ):
            if not norms and not _close_trees(mine, whole):
                return f"prediction {index} on rank {rank}"
    return ""


def _close_trees(found: Any, expected: Any) -> bool:
    ours, theirs = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    size = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    return bool(((found - expected).abs() <= TOLERANCE * size).all())
