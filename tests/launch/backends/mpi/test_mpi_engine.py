"""`--on mpi`: one mpirun for all ranks, with MPI as the transport, and no value on its words."""

from __future__ import annotations

import itertools
import re
import shlex
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


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(commands, ["run", "--on", "mpi", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.needs("mpirun", "mpi4py")
def test_ranks_train_over_mpi(sandbox: Sandbox, warm_variables: dict[str, str]) -> None:
    done = sandbox.farandole(
        *("run", "--on", "mpi", "-n", "2", "--transport", "mpi", "--name", "mine", SCRIPT, "a b"),
        **warm_variables,
        TRY_THIS="out",
    )
    assert done.returncode == 0, done.stderr
    for facts in trained_ranks(done.stdout, 2):
        assert (facts["transport"], facts["name"], facts["arguments"]) == ("mpi", "mine", ["a b"])
        assert facts["variables"] == {"TRY_THIS": "out"}
        assert facts["local"] == [facts["rank"], 2]


@pytest.mark.needs("mpirun")
def test_the_command_line_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRY_SECRET", "hidden")
    words = shlex.split(
        printed(
            *(
                "-H",
                "198.51.100.1:4,198.51.100.2:4",
                "--nodes",
                "2",
                "--per-node",
                "3",
                "--seed",
                "7",
            ),
            *("--dry-run", str(SCRIPT), "--lr", "0.1"),
        )
    )
    at = words.index("-H")
    assert words[at + 1] == "198.51.100.1:3,198.51.100.2:3"
    assert words[words.index("-np") + 1] == "6"
    assert words[-4:] == [words[-4], str(SCRIPT), "--lr", "0.1"]
    names = {word for flag, word in itertools.pairwise(words) if flag == "-x"}
    assert {"FARANDOLE_TOKEN", "MASTER_ADDR", "FARANDOLE_SEED", "TRY_SECRET"} <= names
    assert all(re.fullmatch(r"\w+", name) for name in names)  # no values: others could read them
    assert "hidden" not in " ".join(words)


@pytest.mark.needs("mpirun")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "2"), "--nodes 2: the list of hosts has 1 (localhost). Ask for --nodes 1"),
        (("-H", "198.51.100.1:2", "--per-node", "3"), "--per-node 3: the list of hosts has 2 on"),
        (("-n", "2", "--nodes", "2"), "-n 2 and --nodes or --per-node: give one of them"),
        (("-n", "2", "--restarts", "1"), "--restarts is carried out by Farandole's own launcher"),
        (("-n", "2", "--grace", "9"), "--grace is carried out by Farandole's own launcher"),
        (("-n", "2", "--horovod"), "--horovod is carried out by Farandole's own launcher"),
        (("-n", "2", "--sync", "server"), "parameter servers are started with jobs of this host"),
    ],
)
def test_what_cannot_be_is_refused(arguments: Sequence[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        printed(*arguments, str(SCRIPT))


def test_another_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"--on mpi needs mpirun, .*: apt install openmpi-bin"):
        printed("-n", "2", str(SCRIPT))
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho HYDRA build details:\n")
    fake.chmod(0o755)
    with pytest.raises(UserError, match=r"Open MPI's mpirun, and .* is another \(HYDRA build"):
        printed("-n", "2", str(SCRIPT))
