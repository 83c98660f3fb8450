"""The steps of a job once more, in one process: the weights must be the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kills.strikes import whole_lines
from kills.task import SAMPLES, Numbers, new_model, new_optimizer


def compare(folder: Path) -> dict[str, Any]:
    """How far the workers' weights are from those of the replay, and from each other's."""
    steps = steps_of(folder)
    data, model = Numbers(), new_model()
    optimizer = new_optimizer(model)
    used: dict[int, Counter[int]] = {}
    for (epoch, _), samples in steps.items():
        used.setdefault(epoch, Counter()).update(samples)
        at = torch.tensor(sorted(samples))
        optimizer.zero_grad()
        functional.cross_entropy(model(data.x[at]), data.y[at]).backward()
        optimizer.step()
    weights = [torch.load(path) for path in sorted(folder.glob("weights-*"))]
    whole = Counter(range(SAMPLES))
    return {
        "steps": len(steps),
        "epochs": len(used),
        "epochs_with_every_sample_once": sum(counts == whole for counts in used.values()),
        "workers_with_equal_bits": sum(all(map(torch.equal, own, weights[0])) for own in weights),
        "workers_at_the_end": len(weights),
        "largest_difference_from_serial": max(
            (own - serial).abs().max().item()
            for mine in weights
            for own, serial in zip(mine, model.parameters(), strict=True)
        ),
    }


def steps_of(folder: Path) -> dict[tuple[int, int], set[int]]:
    """The samples of each step. The last batch of a worker that was killed counts unless it was
    read again: it may have been killed when its gradients were in the average already."""
    found: dict[tuple[int, int], set[int]] = {}
    doubtful = []
    for file in folder.glob("steps-*"):
        lines = [json.loads(line) for line in whole_lines(file)]
        read = [line for line in lines if line[0] == "reads"]
        if not (folder / file.name.replace("steps", "weights")).exists() and read:
            doubtful.append(read.pop())
        for _, step, epoch, samples in read:
            found.setdefault((epoch, step), set()).update(samples)
    used: dict[int, Counter[int]] = {}
    for (epoch, _), samples in found.items():
        used.setdefault(epoch, Counter()).update(samples)
    for _, step, epoch, samples in doubtful:
        here = found.setdefault((epoch, step), set())
        if not any(
            used.setdefault(epoch, Counter())[sample] for sample in samples if sample not in here
        ):
            here.update(samples)
    return dict(sorted(found.items()))
