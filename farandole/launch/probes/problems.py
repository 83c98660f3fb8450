"""What is wrong with a host, in words that name it and the next step, and what follows from it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from farandole.errors import LaunchError
from farandole.launch.messages import tell

Severity = Literal["warning", "error"]
_NO_PROGRAM = (126, 127)  # what shells and `env` answer for a program that they cannot start
_NOT_REACHED = 255  # what ssh ends with when it fails itself; programs that act like it do the same
_MOST_LINES = 20


@dataclass(frozen=True)
class Problem:
    """`text` says what is wrong, in whole sentences; `advice` what to do, if `text` does not."""

    host: str
    severity: Severity
    text: str
    advice: str

    def __str__(self) -> str:
        return f"host {self.host}: {self.text} {self.advice}".rstrip()


class UnfitHostsError(LaunchError):
    """These hosts cannot take part."""

    def __init__(self, message: str, hosts: frozenset[str]) -> None:
        super().__init__(message)
        self.hosts = hosts


def errors_among(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.severity == "error"]


def tell_warnings(problems: Iterable[Problem]) -> None:
    for problem in problems:
        if problem.severity == "warning":
            tell(f"warning: {problem}")


def require(problems: Iterable[Problem]) -> None:
    """Raises `UnfitHostsError` with all errors among `problems`."""
    errors = errors_among(problems)
    if errors:
        text = "\n".join(["the job was not started.", *map(str, errors)])
        raise UnfitHostsError(text, frozenset(problem.host for problem in errors))


def no_answer(
    host: str, code: int, complaints: Sequence[str], by: str | None, advice: str
) -> Problem:
    """Why a host was asked in vain: what should have answered ended with this exit code.

    `complaints` are the lines that it wrote. `by` is what reaches the host; None: it is this one.
    """
    lines = [line.strip() for line in complaints if line.strip()][-_MOST_LINES:]
    last = lines[-1].rstrip(".") if lines else "it said nothing"
    if code in _NO_PROGRAM:
        text = f"there is no Python at {sys.executable} ({last})."
        advice = "Install it there at the same path, with torch and Farandole."
    elif code == _NOT_REACHED and by is not None:
        text = f"it cannot be reached by {by}: {last}."
    else:
        text = f"Farandole does not start there: {last} (exit code {code})."
        advice = f"Install the same version there, in the same Python. {advice}"
    return Problem(host, "error", text, "\n  ".join([advice, *lines[:-1]]))
