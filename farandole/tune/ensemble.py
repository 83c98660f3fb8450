"""The best trials together: the class that their averaged predictions name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from optuna.trial import FrozenTrial
from safetensors.torch import save

from farandole.errors import UserError
from farandole.files import write_whole
from farandole.train.choosing.predictions import LABELS, PROBABILITIES, read_predictions
from farandole.tune.study import FOLDER

CALL = "run.predictions(logits.softmax(dim=1), labels)"


@dataclass(frozen=True)
class Ensemble:
    """`members` are the numbers of its trials, and `alone` the accuracy of each of them."""

    members: tuple[int, ...]
    alone: tuple[float, ...]
    accuracy: float
    samples: int

    @property
    def gain(self) -> float:
        """Over its best member."""
        return self.accuracy - max(self.alone)

    def __str__(self) -> str:
        points = 100 * self.gain
        return (
            f"ensemble of trials {', '.join(map(str, self.members))}: accuracy "
            f"{self.accuracy:.4f}, its best member alone {max(self.alone):.4f} "
            f"({points:+.2f} points, {self.samples} samples)"
        )


def build_ensemble(ranked: Sequence[FrozenTrial], count: int, folder: Path) -> Ensemble:
    """Of the `count` best trials. Writes `ensemble.safetensors` and `ensemble.json`.

    Raises `UserError` where a trial has no predictions, or predicts for other samples.
    """
    members = list(ranked[:count])
    if not members:
        raise UserError("--ensemble: no trial has come to its end.")
    total: torch.Tensor | None = None
    labels = torch.empty(0, dtype=torch.int64)
    alone = []
    for trial in members:
        found = read_predictions(folder / str(trial.user_attrs[FOLDER]))
        if found is None:
            raise UserError(
                f"--ensemble: trial {trial.number} has no predictions. The script must call {CALL} "
                "for its validation data."
            )
        probabilities, truth = found
        if total is None:
            total, labels = torch.zeros_like(probabilities), truth
        if not torch.equal(truth, labels) or probabilities.shape != total.shape:
            raise UserError(
                f"--ensemble: trials {members[0].number} and {trial.number} predict for other "
                "samples, or in another order. Their averages would mean nothing: use the same "
                "validation data in every trial, with shuffle=False."
            )
        total += probabilities
        alone.append(_accuracy(probabilities, labels))
    assert total is not None
    mean = total / len(members)
    made = Ensemble(
        tuple(trial.number for trial in members),
        tuple(alone),
        _accuracy(mean, labels),
        len(labels),
    )
    write_whole(folder / "ensemble.safetensors", save({PROBABILITIES: mean, LABELS: labels}))
    record = {
        **asdict(made),
        "choices": {trial.number: trial.params for trial in members},
        "folders": [trial.user_attrs[FOLDER] for trial in members],
    }
    write_whole(folder / "ensemble.json", json.dumps(record, indent=1).encode())
    return made


def _accuracy(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    return float((probabilities.argmax(dim=1) == labels).double().mean())
