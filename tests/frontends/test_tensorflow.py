"""horovod.tensorflow and horovod.keras in real ranks, under `farandole run --horovod`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Sandbox

SCRIPTS = Path(__file__).parent / "scripts"
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "200",  # what would wait for ever ends with its name
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "300",
}


@pytest.mark.parametrize(("ranks", "which"), [(1, ""), (2, ""), (4, "few")])
def test_every_call_means_what_horovod_documents(sandbox: Sandbox, ranks: int, which: str) -> None:
    script = SCRIPTS / "tensorflow_calls.py"
    done = sandbox.farandole("run", "--horovod", "-n", str(ranks), script, which, **QUIET)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert done.stdout.count(" 0 failed") == ranks


def test_two_ranks_train_as_one_with_the_global_batch(sandbox: Sandbox) -> None:
    script = SCRIPTS / "keras_training.py"
    trained = []
    for ranks in (1, 2):
        target = sandbox.folder / f"weights{ranks}.npz"
        done = sandbox.farandole("run", "--horovod", "-n", str(ranks), script, target, **QUIET)
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
        with np.load(target) as kept:
            trained.append({name: kept[name] for name in kept.files})
    alone, together = trained
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=0, atol=1e-12, err_msg=name)
    assert np.isfinite(np.concatenate([value.ravel() for value in alone.values()])).all()


def test_callbacks_and_states_of_keras(sandbox: Sandbox) -> None:
    script = SCRIPTS / "keras_callbacks.py"
    done = sandbox.farandole("run", "--horovod", "-n", "2", script, **QUIET)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert done.stdout.count("all right") == 2


def test_a_script_of_a_horovod_user_runs_unchanged(sandbox: Sandbox) -> None:
    """As accurate with two ranks as alone: guessing would be right in one of ten cases."""
    accuracy = []
    for ranks in ("1", "2"):
        done = sandbox.farandole(
            "run", "--horovod", "-n", ranks, SCRIPTS / "keras_mnist.py", **QUIET
        )
        assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
        (line,) = [line for line in done.stdout.splitlines() if "accuracy" in line]
        accuracy.append(float(line.split()[-1]))
    assert min(accuracy) > 0.9, accuracy


@pytest.mark.parametrize(
    ("backend", "message"),
    [("torch", "Keras runs on torch here, and horovod.keras is for Keras on TensorFlow")],
)
def test_keras_on_another_backend_is_refused(sandbox: Sandbox, backend: str, message: str) -> None:
    script = sandbox.script("other.py", "import farandole.horovod.keras\n")
    done = sandbox.fork(script, KERAS_BACKEND=backend, **QUIET)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_killed_worker_is_replaced_in_a_training_in_a_graph(sandbox: Sandbox) -> None:
    done = sandbox.farandole(
        "horovodrun",
        *("-np", "2", "--min-np", "2", "-H", "localhost:2"),
        *(sys.executable, SCRIPTS / "tensorflow_elastic.py"),
        **QUIET,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert (sandbox.folder / "killed").exists()
    assert done.stdout.count("finished 12") == 2
