"""`run.mean` and `run.sum`: a number of each rank, added up over all of them."""

from __future__ import annotations

import torch

from farandole.train.numbers import T, double, like
from farandole.train.passes import Passes
from farandole.train.session import Session


class Totals:
    """All methods are *together*. The methods of `Run` of the same names say what they do."""

    def __init__(self, session: Session, passes: Passes) -> None:
        self._session = session
        self._passes = passes

    def mean(self, value: T, weight: float) -> T:
        self._passes.settle()
        part = double(value) * float(weight)
        # In one collective: if a rank is lost, its part is in the sum and in the weights, or in
        # neither.
        both = torch.cat([part.reshape(-1), part.new_tensor([float(weight)])])
        total = self._added_up(both)
        return like(value, (total[:-1] / total[-1]).reshape(part.shape))

    def sum(self, value: T) -> T:
        self._passes.settle()
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return self._added_up(value.detach().to(torch.int64, copy=True))
        return like(value, self._added_up(double(value)))

    def _added_up(self, value: torch.Tensor) -> torch.Tensor:
        group = self._session.group
        before = group.generation
        total = group.all_reduce(value)
        if group.generation != before:
            self._session.print(
                f"note: a worker was lost before this sum or mean over all ranks; what it had to "
                f"add may be missing. It is of {group.size} workers."
            )
        return total
