"""The exception tree. Every message carries the values at fault and the next step to take.

`UserError` is also a `ValueError`: the caller passed something that cannot work. The others say
that the world did not co-operate: a worker died, a file is damaged, a disk is full.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FarandoleError(Exception):
    """The root: `except fd.FarandoleError` catches everything raised on purpose."""


class UserError(FarandoleError, ValueError):
    """An argument, option or setting that cannot work; the message says what to write instead."""


class NotElasticError(UserError):
    """What a script does cannot go on without a lost worker; all can start again instead."""


class LaunchError(FarandoleError):
    """Workers could not be started, or one of them failed."""


class JoinError(FarandoleError):
    """This process could not join its job; the message names the ranks that are missing."""


class CommError(FarandoleError):
    """A collective failed; the message names the collective, the rank and the timeout."""


class ModelMismatchError(FarandoleError):
    """The ranks hold different models; the message names the tensor and both shapes."""


class DivergedError(FarandoleError):
    """A gradient, a loss or a parameter is not finite; the message names the rank, the step and
    the tensor."""


class StageError(FarandoleError):
    """A stage of a pipeline failed or was lost; the message names the stage, the rank and why."""


class InexactError(FarandoleError):
    """A layout does not compute what the plain model computes; the message names the layer."""


class CheckpointError(FarandoleError):
    """A checkpoint could not be written, or is damaged; the message names the last good one."""


class NotSerializableError(CheckpointError, UserError):
    """A value that can be neither saved nor sent: `place` in its tree, `kind`, and what to do."""

    def __init__(self, place: str, kind: str, advice: str) -> None:
        super().__init__(
            f"{place or 'the value'} is a {kind}, which cannot be saved or sent. {advice}"
        )
        self.place, self.kind, self.advice = place, kind, advice


class DataError(FarandoleError):
    """A sample cannot be read; the message names the file, the sample in it, and why."""


class DamagedError(FarandoleError):
    """Bytes that arrived are not what was sent."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint to append to an error: the known name nearest to `word`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There are none."
