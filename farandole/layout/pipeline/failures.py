"""How a failure on one rank of a pipeline ends the step on all of them.

Ranks wait for each other's messages. A rank that failed in silence would let the others wait until
their time is up. So the invariant is: whoever leaves a step early has told the others why, and all
ranks raise the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from farandole.comm.p2p.mail import Mail
from farandole.errors import (
    CommError,
    DivergedError,
    FarandoleError,
    InexactError,
    StageError,
    UserError,
)
from farandole.layout.pipeline.interpreter import Interpreter
from farandole.layout.pipeline.stage import Stage

_PATIENCE_SECONDS = 2.0  # for telling others why
_WORDS = {"F": "forward", "B": "backward", "I": "backward", "W": "backward", "U": "update"}

T = TypeVar("T")


class Failures:
    """Those of one rank. `name`: what the rank is called in messages."""

    def __init__(
        self, name: str, mail: Mail, stages: Mapping[int, Stage], interpreter: Interpreter
    ) -> None:
        self._name = name
        self._mail = mail
        self._stages = stages
        self._interpreter = interpreter

    def guarded(self, work: Callable[[], T]) -> T:
        """Runs `work`. If it fails, all ranks are told why, and raise the same reason."""
        if self._mail.failure is not None:
            # Messages of the failed step may still be under way, and would be taken for those of a
            # new one. So a broken pipeline stays broken.
            raise StageError(f"the pipeline was broken by an earlier failure: {self._mail.failure}")
        return self.telling(work)

    def telling(self, work: Callable[[], T]) -> T:
        """As `guarded`, also in a pipeline that is broken. For what waits for nobody."""
        try:
            return work()
        except Exception as error:
            reason = self._reason(error)
            self._tell(reason)
            for stage in self._stages.values():
                stage.forget()
            if isinstance(error, (DivergedError, InexactError)):  # it is no stage that has failed
                raise
            raise StageError(reason) from error

    def refusing(self, check: Callable[[], None]) -> None:
        """Whoever refuses to go on tells the others why, so that nobody waits."""
        try:
            check()
        except UserError as error:
            self._tell(f"{self._name}: {error}")
            raise

    def _tell(self, reason: str) -> None:
        self._mail.fail(reason)
        self._mail.settle(_PATIENCE_SECONDS)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, CommError):
            return str(error)
        action = self._interpreter.current
        where = self._name
        if action is not None:
            what = _WORDS[action.kind]
            if action.kind != "U":
                what += f" of micro-batch {action.micro}"
                where = f"stage {action.stage} on {where}"
            where += f", in the {what}"
        said = (
            str(error) if isinstance(error, FarandoleError) else f"{type(error).__name__}: {error}"
        )
        return f"{where}: {said}"
