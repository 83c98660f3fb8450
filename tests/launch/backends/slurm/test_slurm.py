"""`--on slurm` with a real Slurm: submitted, preempted, queued again, resumed; and in salloc."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from farandole.cli import commands
from farandole.errors import UserError
from tests.support.trained import SCRIPT, trained_ranks

if TYPE_CHECKING:
    from conftest import Sandbox

    from tests.support.slurm import SlurmCluster

PREEMPTED = Path(__file__).parents[3] / "train" / "scripts" / "preempted.py"
RESTARTED = Path(__file__).parents[2] / "scripts" / "restarted.py"
ON_TWO = ("run", "--on", "slurm", "--nodes", "2", "--per-node", "1")


def farandole(*arguments: str) -> list[str]:
    """The command as a fresh process, as Slurm starts it."""
    return [sys.executable, "-m", "farandole", *arguments]


def printed(*arguments: str) -> str:
    """What the command prints."""
    done = CliRunner().invoke(commands, ["run", "--on", "slurm", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_a_job_that_is_preempted_resumes(
    sandbox: Sandbox, slurm: SlurmCluster, warm_variables: dict[str, str]
) -> None:
    known = {**warm_variables, "SLURM_CONF": str(slurm.configuration)}
    done = sandbox.farandole(*ON_TWO, "--name", "preempted", "--time", "30", PREEMPTED, **known)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    log = sandbox.folder / "runs" / "preempted" / f"slurm-{number}.out"
    assert f"submitted job {number} (preempted); output: runs/preempted/slurm-{number}.out" in (
        done.stderr
    )
    script = log.with_name("job.sbatch")
    assert script.stat().st_mode & 0o077 == 0

    def output() -> str:
        return log.read_text() if log.exists() else ""

    ready = [sandbox.folder / f"ready-{rank}" for rank in range(2)]
    sandbox.wait_until(
        lambda: all(path.exists() for path in ready) or "farandole:" in output(), "both train"
    )
    assert all(path.exists() for path in ready), output()
    # What Slurm does two minutes before the time limit.
    slurm.ask("scancel", "--signal=USR1", "--batch", number)
    sandbox.wait_until(lambda: "is queued again" in output(), "it saves")
    sandbox.wait_until(lambda: output().count("went on after") == 2, "both ranks resume")
    sandbox.wait_until_gone()
    assert "Restarts=1" in slurm.ask("scontrol", "show", "job", number)
    steps = re.findall(r"went on after (\d+) steps, run.steps (\d+)", output())
    assert len(set(steps)) == 1
    assert int(steps[0][0]) >= 4
    assert output().count(f"bias {steps[0][0]}") == 2


def test_in_an_allocation(
    sandbox: Sandbox, slurm: SlurmCluster, warm_variables: dict[str, str]
) -> None:
    known = {**warm_variables, "SLURM_CONF": str(slurm.configuration), "TRY_THIS": "out"}
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    # Nodes are reached by srun: many sites allow no ssh to them.
    ssh = sandbox.folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\ntouch ssh-was-used\n")
    ssh.chmod(0o755)
    known["PATH"] = f"{ssh.parent}:{os.environ['PATH']}"
    done = sandbox.run([*salloc, *farandole("run", str(SCRIPT))], **known)
    assert not (sandbox.folder / "ssh-was-used").exists()
    assert done.returncode == 0, done.stderr
    for facts in trained_ranks(done.stdout, 2):
        assert facts["variables"] == {"TRY_THIS": "out"}


def test_all_start_again_in_an_allocation(
    sandbox: Sandbox, slurm: SlurmCluster, warm_variables: dict[str, str]
) -> None:
    known = {**warm_variables, "SLURM_CONF": str(slurm.configuration)}
    salloc = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    words = ["--on", "slurm", "--restarts", "1", "--checkpoint", "every=4steps"]
    done = sandbox.run([*salloc, *farandole("run", *words, str(RESTARTED), "1:11:kill:0")], **known)
    assert done.returncode == 0, done.stderr
    assert "all workers start again from the last checkpoint: workers that slurm" in done.stderr
    assert "was killed by SIGKILL" in done.stderr
    assert "all 2 workers start again (1 of 1 restarts), from runs/restarted-" in done.stderr
    assert "[0] going on from runs/restarted-" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--min", "1"), "--min 1: this job cannot go on with fewer workers"),
        (
            ("--nodes", "4"),
            "--nodes 4: Slurm job 17 has 3 (far1, far2, far3). Ask for --node",
        ),
        (
            ("--nodes", "3", "--per-node", "3"),
            "Slurm job 17 has 2 on far1. Ask for --per-node 1",
        ),
        (
            ("--partition", "main"),
            "--partition is for submitting a job, and this is inside of S",
        ),
    ],
)
def test_an_allocation_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], message: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "far[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2),1")
    with pytest.raises(UserError, match=re.escape(message)):
        printed(*arguments, str(SCRIPT))


def test_srun_starts_the_script_itself(sandbox: Sandbox, slurm: SlurmCluster) -> None:
    known = {"SLURM_CONF": str(slurm.configuration)}
    done = sandbox.run(["srun", "-N1", "-n2", sys.executable, SCRIPT], **known)
    assert done.returncode == 0, done.stderr
    assert [facts["local"] for facts in trained_ranks(done.stdout, 2)] == [[0, 2], [1, 2]]


def test_sbatch_refuses(sandbox: Sandbox, slurm: SlurmCluster) -> None:
    known = {"SLURM_CONF": str(slurm.configuration)}
    done = sandbox.farandole(*ON_TWO, "--partition", "nowhere", SCRIPT, **known)
    assert done.returncode == 1
    assert "farandole: sbatch refuses runs/" in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr


def test_the_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's.py").touch()
    text = printed(
        *("--nodes", "4", "--per-node", "8", "--time", "2:00:00", "--account", "physics"),
        *("--cpus", "3", "--gpus", "8", "--slurm-option=--qos=high", "--slurm-option", "-C a b"),
        *("--name", "mine", "--sync", "local:every=4", "--seed", "7"),
        *("--no-fork", "--dry-run", "it's.py", "--lr", "0.1", "-n", "$HOME"),
    )
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("#SBATCH --job-name=mine", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=8"),
        *("#SBATCH --output=runs/mine/slurm-%j.out", "#SBATCH --open-mode=append"),
        *("#SBATCH --requeue", "#SBATCH --signal=B:USR1@120"),
        *("#SBATCH --time=2:00:00", "#SBATCH --account=physics", "#SBATCH --cpus-per-task=3"),
        *("#SBATCH --gpus-per-node=8", "#SBATCH --qos=high", "#SBATCH '-C a b'"),
    ]
    (command,) = (line for line in text.splitlines() if line.endswith("&"))
    assert command.endswith(
        " -m farandole run --on=slurm --nodes=4 --per-node=8 --name=mine --sync=local:every=4 "
        "--seed=7 --no-fork 'it'\"'\"'s.py' --lr 0.1 -n '$HOME' &"
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "it's.py"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slurm-option", "qos=high"), "give an option of sbatch with its dashes"),
        (("--slurm-option=--a\n#SBATCH -x"), "it must be one line"),
        (("--name", "a%b"), "neither % nor slashes"),
        (("-n", "4"), "as in --nodes 1 --per-node 4"),
        (("--sync", "server"), "parameter servers are started with jobs of this host only"),
        (("--sync", "zzz"), "there is no strategy 'zzz'"),
        (("--transport", "mpi"), "--transport mpi needs ranks that mpirun has started"),
        (("--image", "x"), "it is for --on kubernetes"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    given = (arguments,) if isinstance(arguments, str) else arguments
    with pytest.raises(UserError, match=re.escape(message)):
        printed(*given, "--dry-run", "train.py")


def test_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    with pytest.raises(UserError, match="sbatch is needed, and there is none on the PATH: apt"):
        printed("train.py")
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]
