"""Questions: what can be asked of a table without fetching it.

A question looks at the rows of one range and answers with a vector. The answers of all ranges are
added up, so only what can be added up can be asked: a sum and a count, not a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

import torch

from farandole.errors import UserError
from farandole.server.rules.allowed import find

Question = Callable[[torch.Tensor], torch.Tensor]
"""Gets a matrix, which it must not change, and answers with a vector."""


def _sum(values: torch.Tensor) -> torch.Tensor:
    return _widest(values).sum().view(1)


def _square_sum(values: torch.Tensor) -> torch.Tensor:
    return _widest(values).square().sum().view(1)


def _abs_sum(values: torch.Tensor) -> torch.Tensor:
    return _widest(values).abs().sum().view(1)


def _nonzeros(values: torch.Tensor) -> torch.Tensor:
    return torch.count_nonzero(values).view(1)


def _count(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor([values.numel()])


def _widest(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)


QUESTIONS: MappingProxyType[str, Question] = MappingProxyType(
    {
        "sum": _sum,
        "square_sum": _square_sum,
        "abs_sum": _abs_sum,
        "nonzeros": _nonzeros,
        "count": _count,
    }
)


def parse_question(text: str, allowed: Sequence[str] = ()) -> Question:
    """The question `name`, or the function `package.module.name` of a module in `allowed`.

    Raises `UserError` if there is none. So does a question of a user's, when it is asked, if its
    answer is not a vector.
    """
    path = text.strip()
    if path in QUESTIONS:
        return QUESTIONS[path]
    function = find(path, allowed, what="question", known=QUESTIONS)
    if not callable(function) or isinstance(function, type):
        raise UserError(f"the question {path!r} is not a function.")

    def ask(values: torch.Tensor) -> torch.Tensor:
        answer = function(values)
        if not isinstance(answer, torch.Tensor) or answer.dim() != 1:
            got = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
            raise UserError(
                f"the question {path!r} must answer with a tensor of one dimension; it answered "
                f"with {got}."
            )
        return answer

    return ask
