"""What a run has chosen: by the command line, by `farandole tune`, or by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole.errors import FarandoleError, UserError, nearest
from farandole.train.choosing.choice import Choice, Value, space_text
from farandole.train.choosing.predictions import keep_predictions
from farandole.train.choosing.questions import Questions
from farandole.train.run_metrics import RunMetrics
from farandole.train.session import Session


class Choices:
    """One rank's; rank 0 decides for all."""

    def __init__(self, session: Session, metrics: RunMetrics) -> None:
        self._session = session
        self._metrics = metrics
        self._given = session.settings.chosen
        self._made: dict[str, Choice] = {}
        trial = session.settings.trial
        self._questions = None if trial is None else Questions(trial)

    def choose(self, choice: Choice) -> Value:
        """*Together.* The same value on every rank, and the same if it is asked for again."""
        known = self._made.get(choice.name)
        if known is not None and known.space != choice.space:
            raise _changed(choice, known.space, "before")
        decided: dict[str, Any] = {}
        if self._session.rank == 0:
            decided = self._decide(choice, known)
        decided = self._session.group.broadcast_json(decided)
        if decided.get("error"):
            raise UserError(decided["error"])
        if decided["space"] != choice.space:
            raise _changed(choice, decided["space"], "on rank 0")
        self._made[choice.name] = choice
        value: Value = choice.check(decided["value"])
        if known is None:
            self._metrics.choose(choice.name, value)
            if decided["how"]:
                self._session.print(f"{choice.name} is {value} ({decided['how']})")
        return value

    def _decide(self, choice: Choice, known: Choice | None) -> dict[str, Any]:
        found: dict[str, Any] = {"space": choice.space, "how": ""}
        try:
            if known is not None:
                return found | {"value": self._session.choices[choice.name]}
            if choice.name in self._given:
                value = choice.read(self._given[choice.name])
                return found | {"value": value, "how": "--choose"}
            if self._questions is not None:
                return found | self._questions.ask(choice)
        except FarandoleError as error:
            return found | {"error": str(error)}
        return found | {"value": choice.value(), "how": choice.which_default()}

    def keep_predictions(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        keep_predictions(self._session, probabilities, labels)

    def close(self) -> None:
        """Tells of values that were given for choices that the script did not have."""
        idle = [name for name in self._given if name not in self._made]
        if idle and self._session.rank == 0:
            name = idle[0]
            self._session.print(
                f"note: --choose {name}={self._given[name]}: the script never called "
                f'run.choose("{name}", …). {nearest(name, self._made)}'
            )


def _changed(choice: Choice, other: Mapping[str, Any], where: str) -> UserError:
    return UserError(
        f'run.choose("{choice.name}") is {choice} here, and was {space_text(other)} {where}. Give '
        "it the same bounds everywhere, or another name."
    )
