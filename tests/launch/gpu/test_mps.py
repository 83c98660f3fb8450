"""An MPS daemon for one job: its start, its end, and daemons that are no good."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from farandole.errors import LaunchError, UserError
from farandole.launch.gpu import mps, mps_control, trials

if TYPE_CHECKING:
    from conftest import Sandbox

    from tests.support.gpu_machine import GpuMachine


def processes(identity: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CUDA_MPS_PIPE_DIRECTORY") == identity:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_daemon_from_start_to_end(
    here: GpuMachine, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = mps.MpsDaemon(["GPU-1", "GPU-0"])
    told = daemon.variables
    pipes = Path(told["CUDA_MPS_PIPE_DIRECTORY"])
    assert told["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert pipes.parent.parent == sandbox.temporary
    assert pipes.parent.stat().st_mode & 0o077 == 0, "private"
    assert mps_control.answers(pipes, 100.0)
    assert len(processes(str(pipes))) == 2, "the daemon and its server"
    daemon.check()
    daemon.close()
    assert processes(str(pipes)) == []
    assert not pipes.parent.exists()
    assert capsys.readouterr().err == ""


def test_a_daemon_that_dies(
    here: GpuMachine, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = mps.MpsDaemon(["GPU-0"])
    pipes = daemon.variables["CUDA_MPS_PIPE_DIRECTORY"]
    (control,) = [each for each in processes(pipes) if "sleep" not in each.name()]
    control.kill()
    sandbox.wait_until(lambda: control.status() == psutil.STATUS_ZOMBIE, "the daemon ends")
    with pytest.raises(LaunchError, match=rf"process {control.pid}\) has ended \(signal 9\)"):
        daemon.check()
    daemon.close()
    assert processes(pipes) == [], "its server is gone too"
    assert capsys.readouterr().err == "", "it was said before"


def test_a_daemon_that_cannot_start(
    here: GpuMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAND_IN_MPS", "broken")
    with pytest.raises(LaunchError, match="the server is not supported on this GPU") as raised:
        mps.MpsDaemon(["GPU-0"])
    assert "has ended (exit code 1), before it answered" in str(raised.value)
    assert capsys.readouterr().err == "", "it is said once"


def test_a_daemon_that_does_not_answer(
    here: GpuMachine, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_MPS", "silent")
    monkeypatch.setattr(mps, "_START_SECONDS", 0.5)
    monkeypatch.setattr(mps, "_QUIT_SECONDS", 1e6)  # it is not asked
    with pytest.raises(LaunchError, match=r"did not answer within 0.5 s. It says nothing"):
        mps.MpsDaemon(["GPU-0"])
    assert list(sandbox.temporary.iterdir()) == []


def test_no_daemon_answers_where_nobody_can_look(here: GpuMachine, tmp_path: Path) -> None:
    assert not mps_control.answers(tmp_path / ("x" * 300), 10.0)
    assert not mps_control.answers(tmp_path / "none", 10.0)


def test_a_control_program_that_says_any_bytes(here: GpuMachine, tmp_path: Path) -> None:
    (here.folder / "nvidia-cuda-mps-control").write_bytes(b"#!/bin/sh\necho '\xff 100.0'\n")
    assert mps_control.answers(tmp_path, 10.0)


def test_without_mps(here: GpuMachine) -> None:
    here.lacks("nvidia-cuda-mps-control")
    with pytest.raises(UserError, match="no nvidia-cuda-mps-control on the PATH"):
        mps.MpsDaemon(["GPU-0"])


def test_no_temporary_folder(
    here: GpuMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", fail)
    with pytest.raises(LaunchError, match=r"No usable .* Set TMPDIR to a folder with room"):
        mps.MpsDaemon(["GPU-0"])
    with pytest.raises(LaunchError, match=r"the trials' output: .* Set TMPDIR to a folder with"):
        trials.find_fastest(["train.py"])


def test_sockets_have_short_paths(
    here: GpuMachine, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = sandbox.temporary / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    daemon = mps.MpsDaemon(["GPU-0"])
    folder = Path(daemon.variables["CUDA_MPS_PIPE_DIRECTORY"]).parent
    daemon.close()
    assert folder.parent == Path("/tmp")
    assert len(os.fsencode(folder)) < 50
    assert not folder.exists()
