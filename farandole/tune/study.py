"""The study: which trials there are, in a file that several processes and machines may share.

optuna keeps the trials, samples the choices of the next ones, and says which are not worth their
end. A file that ends in .db or .sqlite is an SQLite database; any other is optuna's journal, which
also works on network file systems.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, BruteForceSampler, CmaEsSampler, RandomSampler, TPESampler
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from farandole.errors import UserError
from farandole.train.choosing.choice import Value, space_text

STUDY = "farandole"
IDENTITY = "identity"
CHOICE = "choice "  # and its name: the space of a choice, in the study's attributes
PROBLEM, FOLDER, OWNER, INTERRUPTED, SECONDS = (
    *("problem", "folder", "owner", "interrupted", "seconds"),
)
_DATABASES = {".db", ".sqlite", ".sqlite3"}


class Grid(BruteForceSampler):
    """Every combination once."""

    def after_trial(self, *arguments: Any, **named: Any) -> None:
        """Nothing: `is_over` looks when another trial is about to begin."""

    def is_over(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        """Whether no combination is left; `trial` is one that is over."""
        try:
            super().after_trial(study, trial, trial.state, trial.values)
        except RuntimeError:  # it tells `Study.optimize`, which is not what runs these, to stop
            return True
        return False


class Study:
    """One study, opened. Raises `UserError` for a file of another script or of something else."""

    def __init__(
        self, path: Path, identity: Mapping[str, Any], *, sampler: str, pruner: str, seed: int
    ) -> None:
        self.path = path
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self.optuna = optuna.create_study(
                storage=_storage(path),
                study_name=STUDY,
                direction=identity["direction"],
                load_if_exists=True,
                pruner=_pruner(pruner),
            )
            before = self.optuna.user_attrs.get(IDENTITY)
        except Exception as error:
            raise UserError(
                f"{path} cannot be read as the file of a study: {error}. Give --storage another "
                "name for a new one."
            ) from error
        if before is None:
            self.optuna.set_user_attr(IDENTITY, dict(identity))
        else:
            _check_same(path, before, identity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self.sampler = _sampler(sampler, _seed(seed, len(self.trials())))
        self.optuna.sampler = self.sampler

    @property
    def higher_is_better(self) -> bool:
        return self.optuna.direction == optuna.study.StudyDirection.MAXIMIZE

    @property
    def is_grid(self) -> bool:
        return isinstance(self.sampler, Grid)

    @property
    def is_exhausted(self) -> bool:
        """Whether a grid has no combination left."""
        over = [trial for trial in self.trials() if trial.state.is_finished() and trial.params]
        sampler = self.sampler
        return isinstance(sampler, Grid) and bool(over) and sampler.is_over(self.optuna, over[-1])

    def trials(self) -> list[FrozenTrial]:
        """All that have begun, here or on other machines, and were not interrupted."""
        known = self.optuna.user_attrs
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING and f"{INTERRUPTED} {trial.number}" not in known
        ]

    def ranked(self) -> list[FrozenTrial]:
        """Those that ran to their end, the best first."""
        done = [t for t in self.trials() if t.state == TrialState.COMPLETE and t.value is not None]
        sign = -1.0 if self.higher_is_better else 1.0
        return sorted(done, key=lambda trial: (sign * float(trial.value or 0.0), trial.number))

    def spaces(self) -> dict[str, dict[str, Any]]:
        """The bounds and options of all choices that trials have asked for, by name."""
        return {
            key.removeprefix(CHOICE): json.loads(text)
            for key, text in self.optuna.user_attrs.items()
            if key.startswith(CHOICE)
        }

    def suggest(self, trial: Trial, name: str, space: Mapping[str, Any]) -> Value:
        """A value for one choice of one trial.

        Raises `UserError` where the study knows it with other bounds.
        """
        self.know(name, space)
        if self.is_grid:
            _check_countable(name, space)
        # Kept as optuna keeps it: by its internal number, within these bounds.
        distribution = distribution_of(space)
        found: Any = _suggest(trial, name, distribution)
        if isinstance(distribution, CategoricalDistribution):
            same = (o for o in space["options"] if o == found and type(o) is type(found))
            option: Value = next(same)
            return option
        return int(found) if isinstance(distribution, IntDistribution) else float(found)

    def know(self, name: str, space: Mapping[str, Any]) -> None:
        """Keeps the bounds of a choice. Raises `UserError` where it had others."""
        known = self.spaces().get(name)
        if known is not None and known != space:
            raise UserError(
                f'run.choose("{name}") is {space_text(space)} in the script, and was '
                f"{space_text(known)} when the study in {self.path} began. Values of both cannot "
                "be compared: give it the same bounds, another name, or --storage another file."
            )
        if known is None:
            self.optuna.set_user_attr(CHOICE + name, json.dumps(space))

    def interrupt(self, number: int) -> None:
        """It was stopped before its end, by nothing of its own: the next one repeats it."""
        (trial,) = (t for t in self.optuna.get_trials(deepcopy=False) if t.number == number)
        self.optuna.set_user_attr(f"{INTERRUPTED} {number}", True)
        self.optuna.tell(number, state=TrialState.FAIL)
        if trial.params:
            self.optuna.enqueue_trial(dict(trial.params))

    def repeat_lost(self, is_lost: Callable[[str], bool]) -> list[int]:
        """Repeats trials whose process is gone, by what `is_lost` says of their owner."""
        running = self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        lost = [t.number for t in running if is_lost(str(t.user_attrs.get(OWNER, "")))]
        for number in lost:
            self.interrupt(number)
        return lost


def distribution_of(space: Mapping[str, Any]) -> BaseDistribution:
    if "options" in space:
        return CategoricalDistribution(tuple(space["options"]))
    low, high, log, step = (space.get(key) for key in ("low", "high", "log", "step"))
    assert low is not None
    assert high is not None
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=bool(log), step=1 if step is None else int(step))
    return FloatDistribution(low, high, log=bool(log), step=step)


def _suggest(trial: Trial, name: str, distribution: BaseDistribution) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        step, log = distribution.step, distribution.log
        return trial.suggest_int(name, distribution.low, distribution.high, step=step, log=log)
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(
        name, distribution.low, distribution.high, step=distribution.step, log=distribution.log
    )


def _check_countable(name: str, space: Mapping[str, Any]) -> None:
    integers = all(isinstance(space.get(bound), int) for bound in ("low", "high"))
    if "options" not in space and not integers and space.get("step") is None:
        raise UserError(
            f'--sampler grid: run.choose("{name}", …) is {space_text(space)}, which has no number '
            "of values. Give it step= or a list of options, or take another sampler."
        )


def _check_same(path: Path, before: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    for key, value in identity.items():
        if before.get(key) != value:
            raise UserError(
                f"{path} is the study of another {key}: {before.get(key)!r}, and this is "
                f"{value!r}. Give --storage another name for a new study."
            )


def _storage(path: Path) -> optuna.storages.BaseStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in _DATABASES:
        return optuna.storages.RDBStorage(
            f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}}
        )
    return optuna.storages.JournalStorage(JournalFileBackend(str(path)))


def _seed(seed: int, trials: int) -> int:
    """A study that goes on, and one that several machines share, must not sample twice the same."""
    if not trials:
        return seed
    host = zlib.crc32(socket.gethostname().encode())
    return int(np.random.SeedSequence([seed, trials, host]).generate_state(1)[0])


def _sampler(name: str, seed: int) -> BaseSampler:
    if name == "random":
        return RandomSampler(seed=seed)
    if name == "grid":
        return Grid(seed=seed)
    if name == "cmaes":
        if importlib.util.find_spec("cmaes") is None:
            raise UserError("--sampler cmaes: pip install cmaes, or take another one.")
        return CmaEsSampler(seed=seed)
    # Others that run at the same time count as bad where they are, so that trials spread.
    return TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


def _pruner(name: str) -> optuna.pruners.BasePruner:
    if name == "none":
        return optuna.pruners.NopPruner()
    if name == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
    if name == "hyperband":
        return optuna.pruners.HyperbandPruner()
    return optuna.pruners.MedianPruner()
