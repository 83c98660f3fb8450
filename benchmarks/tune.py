"""Tuning on digits: what early stopping saves, what we cost, and what ensembles gain.

Three comparisons, with the choices of examples/tune.py's kind, on scikit-learn's digits:

1. the same number of trials stopped early (`--pruner hyperband`) and run to their ends: time and
   accuracy of the best trial;
2. `farandole tune` against optuna driven by hand over plain PyTorch: as many trials, with choices
   at random on both sides, as many at a time, one process for each trial; and, for comparison, all
   trials of a slot in one process, which a crash would end together;
3. the average of the best 5 trials against the best one, over 3 seeds, on data that the choice of
   the trials has not seen.

    python benchmarks/tune.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, save

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).parent / "tuned_digits.py"


def tune(folder: Path, trials: int, epochs: int, seed: int, *words: str) -> dict[str, Any]:
    """One study: its seconds, the accuracy of its best trial, and what it printed."""
    command = [sys.executable, "-m", "farandole", "tune", "--trials", str(trials)]
    command += ["--metric", "accuracy", "--runs", str(folder), "--seed", str(seed)]
    command += [*words, str(SCRIPT), "--epochs", str(epochs), "--seed", str(seed)]
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    best = re.search(r"best: trial (\d+), accuracy ([\d.]+)", done.stdout)
    assert best is not None
    return {"seconds": seconds, "accuracy": float(best[2]), "printed": done.stdout}


def by_hand(folder: Path, trials: int, epochs: int, seed: int, one_process: bool) -> dict[str, Any]:
    """As many trials with optuna's own loop: a process for each of them, or one for each slot."""
    journal = folder / "by-hand.journal"
    command = [sys.executable, str(SCRIPT), "--by-hand", str(journal)]
    command += ["--epochs", str(epochs), "--seed", str(seed)]
    shares = [len(range(slot, trials, slots())) for slot in range(slots())]
    waiting = shares if one_process else [1] * trials
    running: list[subprocess.Popen[bytes]] = []
    begin = time.perf_counter()
    for part, share in enumerate(waiting):
        while len(running) == slots():
            running = [process for process in running if process.poll() is None]
            time.sleep(0.02)
        words = ["--part", str(part), "--trials", str(share)]
        running.append(subprocess.Popen([*command, *words], env=environment()))
    for process in running:
        process.wait()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "accuracy": best_by_hand(journal, trials)}


def best_by_hand(journal: Path, trials: int) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    study = optuna.load_study(study_name=None, storage=optuna.storages.JournalStorage(backend))
    assert len(study.trials) == trials, f"{len(study.trials)} of {trials} trials"
    return float(study.best_value)


def slots() -> int:
    return len(os.sched_getaffinity(0))


def environment() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{known}" if known else str(ROOT)}


def early_stopping(trials: int, epochs: int) -> dict[str, Any]:
    sides: dict[str, dict[str, Any]] = {}
    for name in ("hyperband", "none"):
        with tempfile.TemporaryDirectory() as folder:
            sides[name] = tune(Path(folder), trials, epochs, 0, "--pruner", name)
    ratio = sides["hyperband"]["seconds"] / sides["none"]["seconds"]
    gap = sides["hyperband"]["accuracy"] - sides["none"]["accuracy"]
    print(f"stopped early: {ratio:.2f} of the time of full trials, accuracy {gap:+.4f}")
    return {"ratio": ratio, "accuracy_gap": gap, **{n: figures(s) for n, s in sides.items()}}


def against_optuna(trials: int, epochs: int, repeats: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"ours": [], "by_hand": [], "by_hand_in_one_process": []}
    accuracies: dict[str, float] = {}
    for _ in range(repeats):
        for name in seconds:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                if name == "ours":
                    words = ("--sampler", "random", "--pruner", "none")
                    found = tune(folder, trials, epochs, 0, *words)
                else:
                    found = by_hand(folder, trials, epochs, 0, name == "by_hand_in_one_process")
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
    ends = re.search(r"trials: (.*)", side["printed"])
    return {
        "seconds": side["seconds"],
        "accuracy": side["accuracy"],
        "trials": ends[1] if ends else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=81, help="of a full trial")
    parser.add_argument("--hand-trials", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ensemble-trials", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    result = {
        "early_stopping": early_stopping(args.trials, args.epochs),
        "against_optuna": against_optuna(args.hand_trials, args.epochs, args.repeats),
        "ensembles": ensembles(
            args.ensemble_trials, max(1, args.epochs // 3), args.seeds, min(5, args.ensemble_trials)
        ),
    }
    save("tune", result, args.folder)


if __name__ == "__main__":
    main()
