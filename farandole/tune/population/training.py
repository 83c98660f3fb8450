"""Trains a population: interval by interval, its members side by side on the slots."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from farandole.environment import PERTURBED, UNTIL_EPOCH
from farandole.errors import UserError
from farandole.launch.nested_runs import WarmProcesses
from farandole.report import units
from farandole.train.choosing.choice import Value
from farandole.tune.options import TuneOptions
from farandole.tune.population.evolve import Heir, exchange, sample
from farandole.tune.population.members import Interval, Members
from farandole.tune.results import choices_text
from farandole.tune.slots import Slots
from farandole.tune.study import Study
from farandole.tune.trial_run import Start, TrialRun

_POLL_SECONDS = 0.02
_NEVER = "1000000000steps"  # but a run saves once more at the end of its last epoch
CHECKPOINTS = "checkpoints"
_MARK = ".generation"


class Population:
    """`run` returns when all generations are over. Whatever ends it, no member goes on."""

    def __init__(
        self,
        options: TuneOptions,
        study: Study,
        folder: Path,
        slots: Slots,
        warm: WarmProcesses,
        on_change: Callable[[], None],
    ) -> None:
        assert options.populations is not None
        self._options = options
        self._size = options.populations
        self._study = study
        self._members = Members(study)
        self._folder = folder
        self._slots = slots
        self._warm = warm
        self._on_change = on_change  # an interval of a member is over
        self._is_over = False  # the script has no more epochs

    def run(self) -> None:
        for generation in range(self._options.generations or 1):
            if self._is_over:
                click.echo(f"the epochs of the script are over after generation {generation - 2}")
                return
            heirs = self._heirs(generation)
            done = self._members.intervals()
            missing = [m for m in range(self._size) if (generation, m) not in done]
            for member in missing:
                self._inherit(generation, member, heirs[member])
            self._train(generation, {member: heirs[member] for member in missing})

    def _heirs(self, generation: int) -> dict[int, Heir]:
        if generation == 0:
            return {member: Heir({}) for member in range(self._size)}
        done = self._members.intervals()
        before = {member: done[generation - 1, member] for member in range(self._size)}
        ranked = self._members.rank({m: interval.value for m, interval in before.items()})
        if all(interval.value is None for interval in before.values()):
            raise UserError(
                f"all members failed in generation {generation - 1}; the last of them: "
                f"{before[ranked[-1]].problem}"
            )
        return exchange(
            ranked,
            {member: interval.choices for member, interval in before.items()},
            self._study.spaces(),
            self._members.structure(),
            [self._options.seed, generation],
            {member for member, interval in before.items() if interval.value is not None},
        )

    def _inherit(self, generation: int, member: int, heir: Heir) -> None:
        """Gives a member the checkpoints of its parent, once, also where this is repeated."""
        own = self._folder / f"member-{member}"
        mark = own / _MARK
        if generation and mark.is_file() and mark.read_text() == str(generation):
            return
        if generation == 0 or heir.is_new:
            shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True, exist_ok=True)
        if heir.parent is not None:
            copy = own / f".{CHECKPOINTS}.part"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self._folder / f"member-{heir.parent}" / CHECKPOINTS, copy)
            shutil.rmtree(own / CHECKPOINTS, ignore_errors=True)
            copy.rename(own / CHECKPOINTS)
            click.echo(f"member {member} goes on from member {heir.parent}")
        elif heir.is_new:
            click.echo(f"member {member} starts anew, with {choices_text(heir.choices)}")
        mark.write_text(str(generation))

    def _train(self, generation: int, heirs: dict[int, Heir]) -> None:
        waiting = list(heirs)
        running: list[tuple[int, int, TrialRun, dict[str, Value]]] = []
        try:
            while waiting or running:
                while waiting and (slot := self._slots.take()) is not None:
                    member = waiting.pop(0)
                    run = self._begin(generation, member, slot, heirs[member])
                    running.append((member, slot, run, {}))
                for each in list(running):
                    member, slot, run, chosen = each
                    decide = self._decider(generation, member, heirs[member], chosen)
                    while (question := run.question()) is not None:
                        run.answer(question["name"], decide(question))
                    if run.look():
                        running.remove(each)
                        self._slots.give_back(slot)
                        self._end(generation, member, run, heirs[member], chosen)
                time.sleep(_POLL_SECONDS)
        finally:
            for _, slot, run, _ in running:
                run.stop("interrupted", "")
                self._slots.give_back(slot)
            while [run for _, _, run, _ in running if not run.look()]:
                time.sleep(_POLL_SECONDS)

    def _begin(self, generation: int, member: int, slot: int, heir: Heir) -> TrialRun:
        options = self._options
        share = self._slots.share(slot)
        words = ["-n", str(options.workers), *share.words]
        words += ["--checkpoint", f"every={_NEVER},keep=1"]
        words += ["--seed", str(options.seed), "--grace", f"{options.grace:g}", *options.command]
        until = {UNTIL_EPOCH: str(options.interval * (generation + 1))}
        if heir.parent is not None:
            until[PERTURBED] = "1"
        start = Start(
            f"member-{member}",
            self._folder,
            words,
            self._slots.workers_here,
            {**share.variables, **until},
            options.timeout,
            options.grace,
            fresh=False,
        )
        return TrialRun(start, self._warm, options.metric)

    def _decider(
        self, generation: int, member: int, heir: Heir, chosen: dict[str, Value]
    ) -> Callable[[dict[str, Any]], Callable[[], Value]]:
        def decider(question: dict[str, Any]) -> Callable[[], Value]:
            def decide() -> Value:
                name, space = question["name"], question["space"]
                self._study.know(name, space)
                if question["structure"]:
                    self._members.add_structure(name)
                if name not in heir.choices:
                    seeds = [self._options.seed, generation, member, len(chosen)]
                    heir.choices[name] = sample(space, np.random.default_rng(seeds))
                chosen[name] = heir.choices[name]
                return chosen[name]

            return decide

        return decider

    def _end(
        self, generation: int, member: int, run: TrialRun, heir: Heir, chosen: dict[str, Value]
    ) -> None:
        state, problem = run.result()
        values = run.values()
        if state == "ok" and not values:
            known = ", ".join(run.history.metric_names) or "nothing"
            raise UserError(
                f"--metric {self._options.metric}: the script does not log it. It logs {known}."
            )
        if state == "ok" and len(values) == run.values_before:
            self._is_over = True
            return
        if state == "ok" and not any((run.folder / CHECKPOINTS).glob("*")):
            raise UserError(
                "--populations: a member has saved no checkpoint from which others could go on. "
                "The script must call run.distribute or run.trainer, and loop over "
                "run.epochs(count)."
            )
        done = Interval(
            generation,
            member,
            chosen,
            values[-1] if state == "ok" else None,
            heir.parent,
            heir.is_new,
            problem,
            run.seconds,
        )
        self._members.add(done, run.start.name)
        metric = self._options.metric
        how = f"failed: {problem}" if state != "ok" else f"{metric} {units.number(values[-1])}"
        words = [how, choices_text(chosen), done.origin(), units.seconds(done.seconds)]
        click.echo(f"generation {generation}, member {member}: {'  ·  '.join(filter(None, words))}")
        self._on_change()
