"""Samples that cannot be decoded, where the user has said to skip them.

A dataset hands out a `BadSample` in place of such a sample. It is left out where a batch is made of
samples, in a process of DataLoader's perhaps, and what was wrong with it travels with the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

from farandole.errors import DataError, UserError

OnError = Literal["raise", "skip"]
_SHOWN: Final = 3


@dataclass(frozen=True)
class BadSample:
    """In the place of one that cannot be decoded."""

    reason: str  # with the file, and the number of the sample in it


class SkippingBatch(NamedTuple):
    """A batch, and why samples are missing in it."""

    batch: Any
    reasons: Sequence[str]


class SkippingCollate:
    """Takes the place of a `collate_fn`, and calls the user's own with the good samples."""

    def __init__(self, own: Callable[[list[Any]], Any]) -> None:
        self.own = own

    def __call__(self, samples: list[Any]) -> SkippingBatch:
        reasons = [sample.reason for sample in samples if isinstance(sample, BadSample)]
        if reasons:
            samples = [sample for sample in samples if not isinstance(sample, BadSample)]
        if not samples:
            shown = "; ".join(reasons[:_SHOWN]) + ("; …" if len(reasons) > _SHOWN else "")
            raise DataError(
                f"none of the {len(reasons)} samples of a batch can be decoded, and a step needs "
                f"at least one on every worker: {shown}"
            )
        return SkippingBatch(self.own(samples), reasons)


def check_policy(on_error: str) -> None:
    if on_error not in get_args(OnError):
        raise UserError(f'on_error={on_error!r}: it is "raise" or "skip".')
