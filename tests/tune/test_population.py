"""Population-based training: who goes on from whom, and with which choices."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from farandole.tune.population.evolve import exchange, fitted, perturbed, sample

pytestmark = pytest.mark.needs("optuna")

RATE = {"low": 0.01, "high": 1.0, "log": True}
WIDTH = {"low": 2, "high": 9}
KIND = {"options": ["a", "b", "c"]}
SPACES = {"rate": RATE, "width": WIDTH, "kind": KIND}


def test_the_worst_quarter_goes_on_from_the_best() -> None:
    choices = {n: {"rate": 0.1, "width": 2 + n, "kind": "b"} for n in range(8)}
    kept = new = 0
    for seed in range(40):
        ranked = [7, 0, 1, 2, 3, 4, 5, 6]
        heirs = exchange(ranked, choices, SPACES, {"width"}, [seed], {*range(7)})
        assert sorted(heirs) == list(range(8))
        for member in (7, 0, 1, 2, 3, 4):
            assert heirs[member].choices == choices[member]
            assert heirs[member].parent is None
        for member in (5, 6):
            heir = heirs[member]
            assert heir.choices["rate"] in (pytest.approx(0.08), pytest.approx(0.12))
            assert heir.choices["kind"] in ("a", "c")
            if heir.is_new:
                assert heir.parent is None
                assert heir.choices["width"] in (3, 1 + 2, 2)
                new += 1
            else:
                assert heir.parent == 0, "member 7 has failed"
                assert heir.choices["width"] == 2, "or the weights would not fit"
                kept += 1
    assert kept > new > 0


def test_values_stay_in_their_bounds() -> None:
    random = np.random.default_rng(0)
    spaces = (RATE, WIDTH, KIND, {"low": 0, "high": 8, "step": 4}, {"low": 0.0, "high": 1.0})
    for space in spaces:
        seen = set()
        value = sample(space, random)
        for _ in range(60):
            value = perturbed(value, space, random)
            seen.add(value)
            if "options" in space:
                assert value in space["options"]
            else:
                assert isinstance(value, (int, float))
                assert space["low"] <= value <= space["high"]
                assert isinstance(value, int) == isinstance(space["low"], int)
                assert value == fitted(value, space)
        assert len(seen) > 2


def test_members_go_on_from_better_ones_and_the_study_goes_on(sandbox: Any) -> None:
    sandbox.script(
        "train.py",
        """
import torch, farandole as fd
run = fd.init()
rate = run.choose("rate", 0.001, 1.0, log=True)
model = torch.nn.Linear(1, 1)
torch.nn.init.zeros_(model.weight)
model, opt = run.distribute(model, torch.optim.SGD(model.parameters(), lr=rate))
data = torch.utils.data.TensorDataset(torch.ones(4, 1))
for epoch in run.epochs(2):
    assert opt.param_groups[0]["lr"] == rate, "not the one of the checkpoint"
    for (x,) in run.loader(data, 4):
        opt.zero_grad()
        (-model(x).mean()).backward()
        opt.step()
    print("epoch", epoch, "weight", float(model.weight), "rate", rate)
    run.log(score=float(model.weight))
""",
    )
    words = ("--populations", "2", "--metric", "score", "--storage", "found/study.journal")
    first = sandbox.farandole("tune", *words, "--generations", "1", "train.py")
    assert first.returncode == 0, first.stderr
    done = sandbox.farandole("tune", *words, "--generations", "4", "train.py")
    assert done.returncode == 0, done.stderr
    (worse, better) = map(int, re.findall(r"member (\d) goes on from member (\d)", done.stdout)[0])
    outputs = {n: (sandbox.folder / f"found/member-{n}/output.log").read_text() for n in (0, 1)}
    steps = {n: re.findall(r"epoch (\d) weight (\S+) rate (\S+)", outputs[n]) for n in (0, 1)}
    assert [[int(e) for e, _, _ in steps[n]] for n in (0, 1)] == [[0, 1], [0, 1]]
    weight, rate = (float(text) for text in steps[worse][1][1:])
    assert weight == pytest.approx(float(steps[better][0][1]) + rate, rel=1e-4)
    assert rate / float(steps[better][0][2]) in (pytest.approx(0.8), pytest.approx(1.2))
    assert "the epochs of the script are over after generation 1" in done.stdout
    assert "trials: 4 complete" in done.stdout
    refused = sandbox.farandole("tune", *words, "train.py")
    assert refused.returncode == 2
    assert "--generations" in refused.stderr
