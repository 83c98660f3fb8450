"""Why a model could not be recorded, in one line, and where in its code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

_WORDS_OF_FX = {
    "inputs to control flow": "its control flow depends on the input's values or sizes (if, while, "
    "assert, float(), .item())",
    "object cannot be iterated": "its code iterates over a tensor (for, zip(), *x)",
    "'len' is not supported": "its code asks for len() of a tensor; x.shape[0] can be traced",
    "Proxy": "its code gives a tensor, or a size of one, to something that takes plain values only",
}
"""What torch.fx says, by a part of it, and what that means."""
_NOT_THE_MODEL = (Path(torch.__file__).parent, Path(__file__).parents[1])


class CannotRecordError(Exception):
    """The code does something that may be different for another batch."""


def short(error: BaseException) -> str:
    """The first sentence of a message, which may go on for a page, and where it came from."""
    cause: BaseException | None = error
    while cause is not None:  # torch may fail on the way out, in words that help nobody
        if isinstance(cause, CannotRecordError):
            error = cause
        cause = cause.__context__
    text = str(error).strip() or type(error).__name__
    text = text.splitlines()[0].split(". ")[0].rstrip(".")
    text = next((words for said, words in _WORDS_OF_FX.items() if said in text), text)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_the_model(frame.filename):
            return f"{text} ({Path(frame.filename).name}, line {frame.lineno})"
    return text


def caller() -> str:
    """The line of the model's code that runs now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_the_model(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return "in its forward"


def is_the_model(file: str) -> bool:
    """Whether a file is of the model's code, or of a library that it uses."""
    return not any(Path(file).is_relative_to(place) for place in _NOT_THE_MODEL)
