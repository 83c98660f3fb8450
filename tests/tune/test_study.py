"""`farandole tune`: trials that are sampled, stopped early, repeated, refused."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("optuna")

TRAIN = """
import farandole as fd

run = fd.init()
rate = run.choose("rate", 0.001, 1.0, log=True)
if run.choose("kind", ["plain", "wide"]) == "wide":
    run.choose("width", 8, 64)
for epoch in run.epochs(3):
    run.log(accuracy=1 - abs(rate - 0.1) + epoch / 10)
"""
STUDY = ("--metric", "accuracy", "--storage", "found/study.journal")


def choices_of(trial: Path) -> dict[str, Any]:
    first = (trial / "metrics.jsonl").read_text().splitlines()[0]
    found: dict[str, Any] = json.loads(first)["choices"]
    return found


def test_a_study_goes_on_and_is_only_its_scripts(sandbox: Any) -> None:
    script = sandbox.script("train.py", TRAIN)
    first = sandbox.farandole("tune", "--trials", "3", *STUDY, "train.py")
    assert first.returncode == 0, first.stderr
    trials = sorted(sandbox.folder.glob("found/trial-*"))
    assert [trial.name for trial in trials] == ["trial-0", "trial-1", "trial-2"]
    for trial in trials:
        asked = choices_of(trial)
        assert 0.001 <= asked["rate"] <= 1
        assert ("width" in asked) == (asked["kind"] == "wide"), "what is asked depends on answers"
    rates = [choices_of(trial)["rate"] for trial in trials]
    assert len(set(rates)) == 3
    best = min(rates, key=lambda rate: abs(rate - 0.1))
    assert f"--choose rate={best}" in first.stdout
    again = first.stdout.partition("run it again: farandole ")[2].splitlines()[0].split()
    repeated = sandbox.farandole(*again[:-1], "--name", "again", again[-1])
    assert repeated.returncode == 0, repeated.stderr
    assert choices_of(sandbox.folder / "runs/again")["rate"] == best

    more = sandbox.farandole("tune", "--trials", "4", *STUDY, "train.py")
    assert more.returncode == 0, more.stderr
    assert "3 of 4 trials already" in more.stdout
    assert len(list(sandbox.folder.glob("found/trial-*"))) == 4

    sandbox.script("other.py", TRAIN)
    other = sandbox.farandole("tune", "--trials", "5", *STUDY, "other.py")
    assert other.returncode == 2
    assert "another script: 'train.py', and this is 'other.py'" in other.stderr

    script.write_text(TRAIN.replace("0.001, 1.0", "0.01, 2.0"))
    changed = sandbox.farandole("tune", "--trials", "5", *STUDY, "train.py")
    assert changed.returncode == 2
    for said in ('run.choose("rate")', "0.01 to 2 (log)", "0.001 to 1 (log)"):
        assert said in changed.stderr


def test_a_crash_is_named_and_the_others_go_on(sandbox: Any) -> None:
    script = sandbox.script(
        "train.py",
        """
import farandole as fd
run = fd.init()
how = run.choose("how", ["well", "badly"])
if how == "badly":
    raise RuntimeError("out of <luck>")
run.log(loss=1.0)
""",
    )
    words = ("--sampler", "grid", "--storage", "study.db")
    done = sandbox.farandole("tune", "--trials", "9", "--metric", "loss", *words, "train.py")
    assert done.returncode == 0, done.stderr
    assert "failed: RuntimeError: out of <luck>" in done.stdout
    assert "trials: 1 complete, 1 failed" in done.stdout, "a grid of two has two trials"
    page = (sandbox.folder / "study.db-trials/tune.html").read_text()
    assert "RuntimeError: out of &lt;luck&gt;" in page
    assert "http" not in page, "it needs nothing else"
    script.write_text("import farandole as fd\nfd.init().log(loss=1.0)")
    unlogged = sandbox.farandole("tune", "--trials", "1", "--metric", "acuracy", "train.py")
    assert unlogged.returncode == 2
    assert "--metric acuracy: the script does not log it. It logs loss." in unlogged.stderr


def test_a_trial_that_hangs_ends_at_its_timeout(sandbox: Any) -> None:
    sandbox.script("train.py", "import time, farandole as fd\nfd.init()\ntime.sleep(1000)")
    words = ("--trials", "1", "--metric", "loss", "--timeout", "2")
    done = sandbox.farandole("tune", *words, "train.py")
    assert done.returncode == 1
    assert "failed: ended after its timeout of 2 s" in done.stdout
    sandbox.wait_until_gone()


def test_bad_trials_are_stopped_early(sandbox: Any) -> None:
    sandbox.script(
        "train.py",
        """
import time, farandole as fd
from pathlib import Path
run = fd.init()
number = int(Path(run.folder).name.removeprefix("trial-"))
run.choose("x", 0.0, 1.0)
for epoch in run.epochs(3):
    run.log(accuracy=0.5 if number < 6 else 0.1)
if number >= 6:
    time.sleep(1000)
""",
    )
    words = ("--trials", "7", "--parallel", "1", "--metric", "accuracy", "--sampler", "random")
    done = sandbox.farandole("tune", *words, "train.py")
    assert done.returncode == 0, done.stderr
    assert "trial 6: stopped early at accuracy 0.1" in done.stdout
    assert "trials: 6 complete, 1 stopped early" in done.stdout


def test_an_interrupted_trial_is_repeated(sandbox: Any) -> None:
    sandbox.script(
        "train.py",
        """
import time, farandole as fd
from pathlib import Path
run = fd.init()
run.choose("x", 0.0, 1.0)
run.log(accuracy=0.5)
while not Path("go").exists():
    time.sleep(0.1)
""",
    )
    words = ("--trials", "1", *STUDY, "train.py")
    process = sandbox.start_farandole("tune", *words)
    first = sandbox.folder / "found/trial-0/metrics.jsonl"
    sandbox.wait_until(lambda: first.exists() and "log" in first.read_text(), "a first value")
    process.send_signal(signal.SIGINT)
    stopped = sandbox.finish(process)
    assert stopped.returncode == 130, stopped.stderr
    assert "to go on" in stopped.stdout
    (sandbox.folder / "go").touch()
    done = sandbox.farandole("tune", *words)
    assert done.returncode == 0, done.stderr
    again = sandbox.folder / "found/trial-1"
    assert choices_of(again) == choices_of(first.parent)
    assert "trials: 1 complete" in done.stdout


def test_strategies_are_choices_too(sandbox: Any) -> None:
    sandbox.script(
        "train.py",
        """
import torch, farandole as fd
run = fd.init()
model = torch.nn.Linear(1, 1)
run.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
run.log(loss=float(str(run.settings.sync) != "allreduce"))
run.choose("layout", [1])
""",
    )
    syncs = ("--sync", "local:every=2", "--sync", "allreduce")
    words = ("tune", "-n", "2", "--trials", "9", "--metric", "loss", "--sampler", "grid", *syncs)
    done = sandbox.farandole(*words, "train.py")
    assert done.returncode == 0, done.stderr
    assert "trials: 2 complete" in done.stdout
    again = "run it again: farandole run -n 2 --sync allreduce --choose layout=1 --seed 0 train.py"
    assert again in done.stdout
    reserved = sandbox.farandole(*words, "--layout", "whole", "train.py")
    assert reserved.returncode == 2
    assert 'run.choose("layout", …): --layout is a choice of this study already' in reserved.stderr
    uneven = sandbox.farandole(*words, "--layout", "stages=3", "train.py")
    assert uneven.returncode == 2
    assert "one replica takes 3 workers" in uneven.stderr
