"""How a trial asks the command that tunes it for a value: through files in the trial's folder.

    rank 0 of the trial                          farandole tune
    1.question.json   {"name": "lr", …}   ──▶    samples a value
                                          ◀──    1.answer.json   {"value": 0.01}

So a script may decide what it asks by what it was answered, workers need no library for tuning, and
rank 0 may be on another host that shares the folder.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from farandole.errors import FarandoleError
from farandole.files import write_whole
from farandole.train.choosing.choice import Choice, Value

FOLDER = ".choices"
_POLL_SECONDS = 0.005
_ANSWER_SECONDS = 45.0  # below the minute after which the other ranks give up


class UnansweredError(FarandoleError):
    """`farandole tune` does not answer."""


class Questions:
    """The trial's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._asked = 0

    def ask(self, choice: Choice) -> dict[str, Any]:
        """`{"value": …}`, or `{"error": …}`. Raises `UnansweredError`."""
        self._asked += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        question = {
            "name": choice.name,
            "space": choice.space,
            "default": choice.value(),
            "structure": choice.structure,
        }
        write_whole(_question(self._folder, self._asked), json.dumps(question).encode())
        answer = _answer(self._folder, self._asked)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            try:
                found: dict[str, Any] = json.loads(answer.read_text())
                return found
            except FileNotFoundError:
                time.sleep(_POLL_SECONDS)
        raise UnansweredError(
            f"farandole tune has not said within {_ANSWER_SECONDS:g} s what {choice.name!r} is: "
            f"there is no {answer}. Does it still run, and do both see the same folder?"
        )


class Answers:
    """The side of `farandole tune`, for one trial."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._answered = 0

    def next_question(self) -> dict[str, Any] | None:
        """With `name`, `space`, `default` and `structure`; None: nothing is asked now."""
        try:
            found: dict[str, Any] = json.loads(
                _question(self._folder, self._answered + 1).read_text()
            )
        except FileNotFoundError:
            return None
        return found

    def answer(self, value: Value) -> None:
        self._write({"value": value})

    def refuse(self, message: str) -> None:
        """The script is told why, and ends."""
        self._write({"error": message})

    def _write(self, content: dict[str, Any]) -> None:
        self._answered += 1
        write_whole(_answer(self._folder, self._answered), json.dumps(content).encode())


def _question(folder: Path, number: int) -> Path:
    return folder / f"{number}.question.json"


def _answer(folder: Path, number: int) -> Path:
    return folder / f"{number}.answer.json"
