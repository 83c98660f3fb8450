"""Tuning on digits: what early stopping saves, what we cost, and what ensembles gain.

Three comparisons, with the choices of examples/tune.py's kind, on scikit-learn's digits:

1. the same number of trials stopped early (`--pruner halving`) and run to their ends, over 3
   seeds: time and accuracy of the best trial;
2. `farandole tune` against optuna driven by hand over plain PyTorch: the same trials (choices at
   random, those of our study enqueued for optuna's own: a wider model takes longer), as many at a
   time, one process for each trial; and, for comparison, all trials of a slot in one process,
   which a crash would end together;
3. the average of the best 5 trials against the best one, over 3 seeds, on data that the choice of
   the trials has not seen.

    python benchmarks/tune.py                                     about 12 minutes on 2 quiet cores
    python benchmarks/tune.py --only early_stopping --early-seeds 0     one seed of one part

The result file keeps the parts that were measured before and are not measured now.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS, save
from tuned_digits import study_of

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "tuned_digits.py"
PATIENCE_SECONDS = 900.0  # for one study
PARTS = ("early_stopping", "against_optuna", "ensembles")


def tune(folder: Path, trials: int, epochs: int, seed: int, *words: str) -> dict[str, Any]:
    """One study: its seconds, what it printed, and the accuracy of its best trial: on the data by
    which it was chosen, and on data that no choice has seen."""
    command = [sys.executable, "-m", "farandole", "tune", "--trials", str(trials)]
    command += ["--metric", "accuracy", "--runs", str(folder), "--seed", str(seed)]
    command += [*words, str(SCRIPT), "--epochs", str(epochs), "--seed", str(seed)]
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    best = re.search(r"best: trial (\d+), accuracy ([\d.]+)", done.stdout)
    assert best is not None
    (study,) = folder.glob("tune-*")
    return {
        "seconds": seconds,
        "accuracy": float(best[2]),
        "accuracy_unseen": unseen(study, [f"trial-{best[1]}"])["best_alone"],
        "choices": [trial.params for trial in study_in(study / "study.journal").trials],
        "printed": done.stdout,
    }


def by_hand(
    folder: Path, choices: list[dict[str, Any]], epochs: int, seed: int, one_process: bool
) -> dict[str, Any]:
    """Trials of these choices with optuna's own loop: a process for each, or one for each slot."""
    journal = folder / "by-hand.journal"
    trials = len(choices)
    study = study_of(str(journal))
    for choice in choices:
        study.enqueue_trial(choice)
    command = [sys.executable, str(SCRIPT), "--by-hand", str(journal)]
    command += ["--epochs", str(epochs), "--seed", str(seed)]
    shares = [len(range(slot, trials, slots())) for slot in range(slots())]
    waiting = shares if one_process else [1] * trials
    running: list[subprocess.Popen[bytes]] = []
    begin = time.perf_counter()
    for share in waiting:
        while len(running) == slots():
            running = [process for process in running if process.poll() is None]
            time.sleep(0.02)
        running.append(subprocess.Popen([*command, "--trials", str(share)], env=environment()))
    for process in running:
        process.wait(PATIENCE_SECONDS)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "accuracy": best_by_hand(journal, trials)}


def best_by_hand(journal: Path, trials: int) -> float:
    study = study_in(journal)
    complete = [trial for trial in study.trials if trial.value is not None]
    assert len(complete) == len(study.trials) == trials, f"{len(complete)} of {trials} trials"
    return float(study.best_value)


def study_in(journal: Path) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    return optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend))


def slots() -> int:
    return len(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{known}" if known else str(ROOT)}


def early_stopping(
    trials: int, epochs: int, seeds: list[int], known: dict[str, Any]
) -> dict[str, Any]:
    """With each seed; seeds that were measured before with as many trials and epochs count too."""
    same = (known.get("trials"), known.get("epochs")) == (trials, epochs)
    rows: dict[str, Any] = dict(known["seeds"]) if same else {}
    for seed in seeds:
        sides: dict[str, dict[str, Any]] = {}
        for name in ("halving", "none"):
            with tempfile.TemporaryDirectory() as folder:
                sides[name] = tune(Path(folder), trials, epochs, seed, "--pruner", name)
        rows[str(seed)] = {
            "ratio": sides["halving"]["seconds"] / sides["none"]["seconds"],
            "accuracy_gap": sides["halving"]["accuracy"] - sides["none"]["accuracy"],
            "unseen_gap": sides["halving"]["accuracy_unseen"] - sides["none"]["accuracy_unseen"],
            **{name: figures(side) for name, side in sides.items()},
        }
    ratios = [row["ratio"] for row in rows.values()]
    gaps = {
        which: [row[which] for row in rows.values()] for which in ("accuracy_gap", "unseen_gap")
    }
    print(f"stopped early: {max(ratios):.2f} of the time of full trials at most")
    for which, values in gaps.items():
        print(f"  {which}: {', '.join(f'{value:+.4f}' for value in values)}")
    return {
        "ratio": max(ratios),
        **{which: statistics.mean(values) for which, values in gaps.items()},
        "trials": trials,
        "epochs": epochs,
        "seeds": dict(sorted(rows.items())),
    }


def against_optuna(trials: int, epochs: int, repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"ours": [], "by_hand": [], "by_hand_in_one_process": []}
    accuracies: dict[str, float] = {}
    choices: list[dict[str, Any]] = []
    for _ in range(repeats):
        for name in seconds:  # ours first: it chooses
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                if name == "ours":
                    words = ("--sampler", "random", "--pruner", "none")
                    found = tune(folder, trials, epochs, 0, *words)
                    choices = found["choices"]
                else:
                    found = by_hand(folder, choices, epochs, 0, name == "by_hand_in_one_process")
            seconds[name].append(found["seconds"])
            accuracies[name] = found["accuracy"]
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = middle["ours"] / middle["by_hand"]
    alone = middle["ours"] / middle["by_hand_in_one_process"]
    print(f"against optuna by hand: {ratio:.2f} of its time with a process for each trial,")
    print(f"                        {alone:.2f} of its time with all trials in one process a slot")
    return {
        "ratio": ratio,
        "ratio_to_one_process": alone,
        "seconds": seconds,
        "accuracy": accuracies,
        "trials": trials,
        "epochs": epochs,
    }


def ensembles(trials: int, epochs: int, seeds: int, size: int) -> dict[str, Any]:
    rows = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as place:
            words = ("--pruner", "none", "--ensemble", str(size))
            tune(Path(place), trials, epochs, seed, *words)
            (record,) = Path(place).glob("*/ensemble.json")
            rows.append(unseen(record.parent, json.loads(record.read_text())["folders"]))
    gains = [row["together"] - row["best_alone"] for row in rows]
    gain = statistics.mean(gains)
    shown = ", ".join(f"{100 * g:+.2f}" for g in gains)
    print(f"ensembles of {size}: {100 * gain:+.2f} points over the best single ({shown})")
    return {"gain": gain, "gains": gains, "seeds": rows, "size": size, "trials": trials}


def unseen(folder: Path, members: list[str]) -> dict[str, float]:
    """The accuracy on test data of the best trial by validation data, and of all together."""
    import torch
    from safetensors.torch import load_file

    found = [load_file(folder / member / "test.safetensors") for member in members]
    labels = found[0]["labels"]

    def accuracy(probabilities: torch.Tensor) -> float:
        return float((probabilities.argmax(dim=1) == labels).double().mean())

    total = torch.stack([each["probabilities"] for each in found]).mean(dim=0)
    return {"together": accuracy(total), "best_alone": accuracy(found[0]["probabilities"])}


def figures(side: dict[str, Any]) -> dict[str, Any]:
    ends = re.search(r"^trials: (.*)", side["printed"], re.MULTILINE)
    return {
        "seconds": side["seconds"],
        "accuracy": side["accuracy"],
        "accuracy_unseen": side["accuracy_unseen"],
        "trials": ends[1] if ends else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--early-seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=54, help="of a full trial")
    parser.add_argument("--hand-trials", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ensemble-trials", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "early_stopping": lambda: early_stopping(
            args.trials,
            args.epochs,
            args.early_seeds,
            known_parts(args.folder).get("early_stopping", {}),
        ),
        "against_optuna": lambda: against_optuna(args.hand_trials, args.epochs, args.repeats),
        "ensembles": lambda: ensembles(
            args.ensemble_trials, max(1, args.epochs // 3), args.seeds, min(5, args.ensemble_trials)
        ),
    }
    for name in args.only:
        measured = {"command": shlex.join(["python", *sys.argv]), **parts[name]()}
        save("tune", {**known_parts(args.folder), name: measured}, args.folder)


def known_parts(folder: Path) -> dict[str, Any]:
    path = folder / "tune.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {name: known[name] for name in PARTS if name in known}


if __name__ == "__main__":
    main()
