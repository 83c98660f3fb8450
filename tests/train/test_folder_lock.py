"""One job at a time saves into a folder; where nothing can be locked, nothing is mixed either."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import farandole as fd
from farandole.errors import CheckpointError
from farandole.testing import run_world
from farandole.train import Run
from farandole.train.checkpoint import checkpoint
from farandole.train.checkpoint.folder_lock import NAME, lock

SCRIPTS = Path(__file__).parent / "scripts"
TWO_SAVERS = Path(__file__).parents[2] / "benchmarks" / "two_savers.py"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)


def first_line(process: Any) -> list[str]:
    line: str = process.stdout.readline()
    assert line, process.stderr.read()
    return line.split()


def half_written(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def distributed(run: Run) -> nn.Module:
    model = nn.Linear(2, 2)
    run.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    return model


def test_a_second_job_is_refused_until_the_first_is_dead(sandbox: Any, tmp_path: Path) -> None:
    """By SIGKILL, with a child left behind that was forked from it."""
    holder = sandbox.start([sys.executable, SCRIPTS / "holds_folder.py", tmp_path, "child"])
    pid, child, _ = first_line(holder)
    folder = tmp_path / "shared/checkpoints"
    begun = folder / ".000001.0123456789abcdef.tmp"  # in the middle of a save
    begun.mkdir()

    def refused(run: Run) -> list[str]:
        distributed(run)
        told = []
        for use in (run.save, run.load, lambda: run.save(folder / "../checkpoints")):
            with pytest.raises(CheckpointError) as caught:
                use()
            told.append(str(caught.value))
            run.group.barrier()
        return told

    # The world's runs are named "world": a link makes its folder the same one.
    (tmp_path / "world").symlink_to(tmp_path / "shared")
    for told in run_world(2, refused, folder=tmp_path):
        for message in told:
            assert f"process {pid} on {socket.gethostname()!r}, since 20" in message
            assert "--name" in message

    def refused_before_its_first_step(run: Run) -> None:
        distributed(run)
        batches = iter(run.loader([torch.ones(2)] * 4, batch_size=1))  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=f"process {pid} on"):
            next(batches)

    policy = fd.Checkpoints(every="1h")
    run_world(1, refused_before_its_first_step, folder=tmp_path, checkpoints=policy)
    assert begun.exists()
    assert checkpoint.names(folder) == ["000000"]

    os.kill(int(pid), signal.SIGKILL)
    holder.wait()
    holder.stdout.close()  # not to its end: the child has it too
    holder.stderr.close()
    assert psutil.pid_exists(int(child))

    def goes_on(run: Run) -> Path:
        distributed(run)
        assert run.load() == {"best": 1}
        return run.save()

    try:
        assert run_world(1, goes_on, folder=tmp_path)[0].name == "000001"
    finally:
        os.kill(int(child), signal.SIGKILL)
    sandbox.wait_until_gone()
    assert half_written(folder) == []  # removed by the new holder
    assert not (folder / NAME).exists()  # given back


def test_a_checkpoint_of_a_live_job_can_be_read_by_its_path(sandbox: Any, tmp_path: Path) -> None:
    holder = sandbox.start([sys.executable, SCRIPTS / "holds_folder.py", tmp_path])
    pid, _, made = first_line(holder)

    def body(run: Run) -> Any:
        distributed(run)
        return run.load(Path(made).parent)

    assert run_world(1, body, folder=tmp_path / "other") == [{"best": 1}]
    os.kill(int(pid), signal.SIGKILL)
    holder.communicate()


def test_a_job_that_has_saved_nothing_yet_keeps_others_out(tmp_path: Path) -> None:
    """A job that was queued again beside its predecessor, which is stuck in its first epoch."""
    folder = tmp_path / "world/checkpoints"
    ready, tell = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(folder, tell))
    holder.start()
    try:
        assert ready.recv() == "held"
        with pytest.raises(CheckpointError, match=f"process {holder.pid} on .* saves into"):
            run_world(2, lambda run: run.load(), folder=tmp_path)
    finally:
        holder.kill()
        holder.join()
    assert run_world(2, lambda run: run.load(), folder=tmp_path) == [None, None]


def hold(folder: Path, tell: Any) -> None:
    folder.mkdir(parents=True)
    lock(folder)
    tell.send("held")
    time.sleep(600)


def test_a_run_that_finds_and_saves_nothing_leaves_no_folder(tmp_path: Path) -> None:
    assert run_world(2, lambda run: run.load(), folder=tmp_path) == [None, None]
    assert not (tmp_path / "world/checkpoints").exists()


def test_runs_of_one_process_share_a_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    with fd.init(name="mine") as first, fd.init(name="mine", folder="link") as second:
        assert first.save().name == "000000"
        with pytest.warns(UserWarning, match="of an earlier run"):
            assert second.save().name == "000001"
        assert first.save(tmp_path / "runs/mine/checkpoints", keep=1).name == "000002"
        second.close()
        assert (first.folder / "checkpoints" / NAME).exists()  # the other one has it still
        assert checkpoint.names(first.folder / "checkpoints") == ["000001", "000002"]
    assert not (first.folder / "checkpoints" / NAME).exists()


def test_a_folder_that_was_removed_is_locked_again(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        folder = run.save().parent
        shutil.rmtree(folder)
        run.save()
        assert (folder / NAME).exists()
        assert not _can_lock(folder)

    run_world(1, body, folder=tmp_path)


def _can_lock(folder: Path) -> bool:
    handle = os.open(folder / NAME, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


def test_a_forked_process_neither_keeps_nor_removes_the_lock(tmp_path: Path) -> None:
    held = lock(tmp_path)
    pid = os.fork()
    if pid == 0:
        held.release()  # as at the end of the interpreter
        opened = [file.path for file in psutil.Process().open_files()]
        os._exit(1 if held.is_valid() or str(tmp_path / NAME) in opened else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert held.is_valid()
    assert not _can_lock(tmp_path)
    held.release()
    assert not (tmp_path / NAME).exists()


def test_many_take_turns(tmp_path: Path) -> None:
    """The file is removed and made again all the time, and nobody holds a removed one."""

    def take(pipe: int) -> None:
        taken = 0
        while taken < 50:
            try:
                held = lock(tmp_path)
            except CheckpointError:
                continue
            marker = tmp_path / "marker"
            marker.touch(exist_ok=False)  # raises if another one is inside
            marker.unlink()
            held.release()
            taken += 1
        os.write(pipe, b"ok")

    ends = []
    for _ in range(3):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                take(writer)
            finally:
                os._exit(0)
        os.close(writer)
        ends.append((pid, reader))
    for pid, reader in ends:
        os.waitpid(pid, 0)
        with os.fdopen(reader, "rb") as told:
            assert told.read() == b"ok"


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 5000, '{"process": "x", "host": 1, "since": 2}', "\x00" * 10]
)
def test_what_is_written_in_the_lock_is_not_trusted(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    handle = os.open(tmp_path / NAME, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match=r"another process.*--name"):
        lock(tmp_path)
    os.close(handle)
    lock(tmp_path).release()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        lock(tmp_path / "c")
    assert (tmp_path / "precious").read_text() == "text"


@pytest.mark.usefixtures("no_locks")
def test_without_locks_it_is_said_once_and_nothing_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "world/checkpoints"

    def body(run: Run) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.save(keep=1)
            (folder / ".000009.ff.tmp").mkdir()  # another job's, under way
            shutil.copytree(folder / "000000", folder / "000001")  # another job's
            run.save(keep=1)
        return [str(each.message) for each in told]

    (messages,) = run_world(1, body, folder=tmp_path)
    (message,) = messages
    assert "cannot be locked ([Errno" in message
    assert "No locks available" in message
    assert checkpoint.names(folder) == ["000001", "000002"]
    assert half_written(folder) == [".000009.ff.tmp"]


@pytest.fixture
def overtaken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Another job takes the number between the beginning of a save and its end."""
    taken: list[Path] = []
    honest = checkpoint.begin

    def begin(folder: Path) -> Path:
        folder.mkdir()
        (folder / "manifest.json").write_text("another job's")
        folder.with_name(f"{int(folder.name) + 1:06d}").write_text("not even a folder")
        taken.append(folder)
        return honest(folder)

    monkeypatch.setattr(checkpoint, "begin", begin)
    return taken


@pytest.mark.usefixtures("no_locks")
def test_a_number_that_is_taken_meanwhile_is_not_written_over(
    tmp_path: Path, overtaken: list[Path]
) -> None:
    with warnings.catch_warnings():  # of all ranks, which are threads here
        warnings.simplefilter("ignore")
        made = run_world(2, lambda run: run.save(keep=1, best=1), folder=tmp_path)
    assert [path.name for path in made] == ["000002"] * 2
    assert (overtaken[0] / "manifest.json").read_text() == "another job's"
    assert checkpoint.read(made[0])["state"] == {"best": 1}


def test_an_error_of_any_kind_leaves_no_half_written_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_parts", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_world(1, lambda run: run.save(), folder=tmp_path)
    assert not (tmp_path / "world/checkpoints").exists(), "nor the folder, which held nothing else"


def test_two_jobs_in_one_folder(sandbox: Any, tmp_path: Path) -> None:
    """The benchmark, shortened: two jobs of two ranks, with locks and without."""
    done = sandbox.fork(TWO_SAVERS, "--seconds", "2", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "two_savers.json").read_text())
    for name in ("locked", "unlocked"):
        row = result[name]
        assert row["broken"] == row["mixed"] == row["lost"] == 0, row
        assert all(row["by_job"]), row  # both have saved
    assert result["locked"]["refused"] > 0
