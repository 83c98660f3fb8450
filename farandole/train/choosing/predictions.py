"""What a trained model predicts for the validation data, kept for an ensemble of several runs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from farandole.errors import UserError
from farandole.files import write_whole
from farandole.train.session import Session
from farandole.train.settings import unwritable

FILE_NAME = "predictions.safetensors"
PROBABILITIES, LABELS = "probabilities", "labels"
_TOLERANCE = 1e-2  # half precision does not add up to 1 more exactly


def keep_predictions(session: Session, probabilities: torch.Tensor, labels: torch.Tensor) -> None:
    """*Together.* Puts the parts of all ranks together, in the order of the ranks, in one file."""
    problem = _problem(probabilities, labels)
    problems = session.group.gather_json(problem)
    if any(problems):
        rank = next(rank for rank, said in enumerate(problems) if said)
        raise UserError(f"run.predictions on rank {rank}: {problems[rank]}")
    shares = session.group.all_gather(probabilities.detach().to("cpu", torch.float32))
    truths = session.group.all_gather(labels.detach().to("cpu", torch.int64))
    if session.rank != 0:
        return
    widths = {share.shape[1] for share in shares if len(share)}
    if len(widths) > 1:
        raise UserError(f"run.predictions: ranks have different numbers of classes: {widths}.")
    parts = [share for share in shares if len(share)]
    content = {PROBABILITIES: torch.cat(parts), LABELS: torch.cat(truths)}
    try:
        session.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(session.folder, error) from error
    write_whole(session.folder / FILE_NAME, save(content))


def read_predictions(folder: Path) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Probabilities and labels; None where there are none. Raises `UserError` for damage."""
    path = folder / FILE_NAME
    try:
        found = load(path.read_bytes())
        return found[PROBABILITIES], found[LABELS]
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, KeyError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _problem(probabilities: torch.Tensor, labels: torch.Tensor) -> str:
    shapes = f"{tuple(probabilities.shape)} and {tuple(labels.shape)}"
    if probabilities.dim() != 2 or labels.dim() != 1 or len(probabilities) != len(labels):
        return f"give a row of probabilities and a label for each sample; their shapes are {shapes}"
    if labels.is_floating_point():
        return "labels are the numbers of classes, and these are no integers"
    if not len(labels):
        return ""
    sums = probabilities.detach().to(torch.float64).sum(dim=1)
    if float(probabilities.min()) < 0 or float((sums - 1).abs().max()) > _TOLERANCE:
        return (
            "each row must be probabilities, at least 0, that add up to 1: give "
            "logits.softmax(dim=1)"
        )
    if not 0 <= int(labels.min()) <= int(labels.max()) < probabilities.shape[1]:
        return (
            f"labels go from {int(labels.min())} to {int(labels.max())}, and there are "
            f"{probabilities.shape[1]} classes"
        )
    return ""
