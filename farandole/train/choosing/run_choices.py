"""`run.choose` and `run.predictions`: how a script takes part in a search for its best settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

from farandole.train.choosing.choice import Choice
from farandole.train.choosing.choices import Choices

OptionT = TypeVar("OptionT", bound="bool | int | float | str | None")
_MISSING: Any = object()


class RunChoices:
    """The methods of a `Run` by which it is tuned."""

    _choices: Choices

    @overload
    def choose(
        self,
        name: str,
        low: int,
        high: int,
        *,
        log: bool = False,
        step: int | None = None,
        default: int = ...,
        structure: bool = False,
    ) -> int: ...

    @overload
    def choose(
        self,
        name: str,
        low: float,
        high: float,
        *,
        log: bool = False,
        step: float | None = None,
        default: float = ...,
        structure: bool = False,
    ) -> float: ...

    @overload
    def choose(
        self,
        name: str,
        options: Sequence[OptionT],
        /,
        *,
        default: OptionT = ...,
        structure: bool = False,
    ) -> OptionT: ...

    def choose(
        self,
        name: str,
        low: Any,
        high: Any = None,
        *,
        log: bool = False,
        step: Any = None,
        default: Any = _MISSING,
        structure: bool = False,
    ) -> Any:
        """*Together.* A value between `low` and `high`, or one of a list of options.

        `farandole tune` decides what it is, or `farandole run --choose NAME=VALUE`. Otherwise it is
        `default`; without one the middle of the bounds (the geometric one with `log`), or the first
        option. All ranks get the same, and the run's metrics have it. Bounds are inclusive, and two
        integers are bounds of an integer. `structure`: it decides the shape of the model, such as
        its width, so that weights trained with another value do not fit.

        Raises `UserError` on every rank for bounds that cannot be, and for a name whose bounds
        have changed, in the script or since the study began.
        """
        given = default is not _MISSING
        return self._choices.choose(
            Choice.make(
                name,
                low,
                high,
                log=log,
                step=step,
                default=default if given else None,
                has_default=given,
                structure=structure,
            )
        )

    def predictions(self, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
        """*Together.* Keeps what the model predicts for validation data, for `--ensemble`.

        A row of probabilities and a label for each of this rank's samples: those of `run.loader(…,
        shuffle=False)`, or all of them on one rank and none on the others. Call it when the model
        is trained, or after each epoch: the last call counts. They are written to
        `predictions.safetensors` in the run's folder. Raises `UserError` on every rank for what are
        no probabilities.
        """
        self._choices.keep_predictions(probabilities, labels)
