"""The steps of an elastic job once more, in one process: see tests/train/elastic/scripts/killed.py.

Each worker writes down which samples it reads in which step. The weights must be those of a model
that takes the same steps, and every sample of an epoch must be part of exactly one of them.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

SCRIPT = Path(__file__).parents[1] / "train" / "elastic" / "scripts" / "killed.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("killed", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def steps_of(folder: Path) -> dict[tuple[int, int], set[int]]:
    """The samples of each step, by epoch and number.

    The last batch of a worker that was killed counts, unless it was read again: it may have been
    killed when its gradients were in the average already, or before.
    """
    read = {
        path.name.removeprefix("used-"): list(map(json.loads, path.read_text().splitlines()))
        for path in folder.glob("used-*")
    }
    found: dict[tuple[int, int], set[int]] = {}
    doubtful = []
    for worker, lines in read.items():
        if lines and not (folder / f"weights-{worker}").exists():
            doubtful.append(lines.pop())
        for step, epoch, samples in lines:
            found.setdefault((epoch, step), set()).update(samples)
    for step, epoch, samples in doubtful:
        elsewhere = [s for (e, number), s in found.items() if e == epoch and number != step]
        if not set(samples) & set().union(*elsewhere):
            found.setdefault((epoch, step), set()).update(samples)
    return dict(sorted(found.items()))


def require_exact(folder: Path, survivors: set[str], *, rate: float | None = None) -> None:
    """The weights of all workers that have ended in order are equal, and those of the replay.

    `rate` is that of training without a scheduler.
    """
    weights = {path.name.removeprefix("weights-"): path for path in folder.glob("weights-*")}
    assert set(weights) == survivors
    script = load_script()
    model = script.new_model()
    optimizer, scheduler = script.new_optimizer(model)
    if rate is not None:
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    used: dict[int, Counter[int]] = {}
    for (epoch, _), samples in steps_of(folder).items():
        used.setdefault(epoch, Counter()).update(samples)
        x, y, _ = zip(*map(script.item, sorted(samples)), strict=True)
        optimizer.zero_grad()
        (model(torch.stack(x)) - torch.stack(y)).pow(2).mean().backward()
        optimizer.step()
        if rate is None:
            scheduler.step()
    assert all(counts == Counter(range(47)) for counts in used.values())
    loaded = [torch.load(path) for path in weights.values()]
    for samples, *parameters in loaded:
        assert samples == 47 * len(used)
        for first, own, serial in zip(loaded[0][1:], parameters, model.parameters(), strict=True):
            assert torch.equal(own, first)
            assert (own - serial).abs().max() <= 1e-12
