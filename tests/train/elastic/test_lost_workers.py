"""Workers that are killed for good in the middle of a step: the weights are those of one process
that takes the same steps, with exactly the samples that the survivors and newcomers read."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
KILLED = SCRIPTS / "killed.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("killed", KILLED)
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
        if not (folder / f"weights-{worker}").exists():
            doubtful.append(lines.pop())
        for step, epoch, samples in lines:
            found.setdefault((epoch, step), set()).update(samples)
    for step, epoch, samples in doubtful:
        elsewhere = [s for (e, number), s in found.items() if e == epoch and number != step]
        if not set(samples) & set().union(*elsewhere):
            found.setdefault((epoch, step), set()).update(samples)
    return dict(sorted(found.items()))


def require_exact(folder: Path, survivors: set[str]) -> None:
    weights = {path.name.removeprefix("weights-"): path for path in folder.glob("weights-*")}
    assert set(weights) == survivors
    script = load_script()
    model = script.new_model()
    optimizer, scheduler = script.new_optimizer(model)
    used: dict[int, Counter[int]] = {}
    for (epoch, _), samples in steps_of(folder).items():
        used.setdefault(epoch, Counter()).update(samples)
        x, y, _ = zip(*map(script.item, sorted(samples)), strict=True)
        optimizer.zero_grad()
        (model(torch.stack(x)) - torch.stack(y)).pow(2).mean().backward()
        optimizer.step()
        scheduler.step()
    assert all(counts == Counter(range(47)) for counts in used.values())
    loaded = [torch.load(path) for path in weights.values()]
    for samples, *parameters in loaded:
        assert samples == 47 * len(used)
        for first, own, serial in zip(loaded[0][1:], parameters, model.parameters(), strict=True):
            assert torch.equal(own, first)
            assert (own - serial).abs().max() <= 1e-12


@pytest.mark.parametrize(
    ("doomed", "survivors"),
    [
        # Rank 0, before it has begun to average; then in the next generation the last rank, in the
        # middle of its buckets.
        (["0:2:forward", "3:9:backward"], {"1", "2"}),
        # Its gradients are in the average, and it does not apply it; two at once.
        (["2:4:step", "1:4:forward"], {"0", "3"}),
    ],
)
def test_survivors_finish_the_step(
    farandole_cli: Any, tmp_path: Path, doomed: list[str], survivors: set[str]
) -> None:
    few = "allreduce:bucket_mib=0.0001"  # per bucket: each tensor has its own
    done = farandole_cli("run", "-n", "4", "--min", "2", "--sync", few, KILLED, *doomed)
    assert done.returncode == 0, done.stderr
    require_exact(tmp_path, survivors)
    assert "was killed by SIGKILL" in done.stderr


def test_replacements_join_in_the_middle_of_an_epoch(sandbox: Any, tmp_path: Path) -> None:
    """Rank 0 is killed, and then its successor. The log goes on in one file."""
    words = ["-n", "4", "--min", "2", "--restarts", "2", "--name", "one", KILLED]
    done = sandbox.farandole("run", *words, "0:3:backward", "1:12:forward", REPLACES="1")
    assert done.returncode == 0, done.stderr
    require_exact(tmp_path, {"2", "3", "4", "5"})
    log = tmp_path / "runs" / "one" / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    logged = [record["metrics"] for record in records if record["event"] == "log"]
    assert [metrics["epoch"] for metrics in logged] == list(range(len(logged)))
    assert logged[-1]["size"] == 4
