"""Where drills run one after another: a process with folders, shared memory and a warm start.

Importing torch takes longer than all the rest of a drill. So a slot has a fork server, as a race
has: launchers are forked from it, and so are their workers. Everything that a slot starts carries
its mark. Where it can (root), a slot has a name space of mounts of its own, in which /dev/shm is a
folder of the slot: what a job leaves there can be seen, and is nobody else's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from farandole.launch.forks import Forked, ForkError, Forks
from farandole.launch.job_directory import worker_defaults
from farandole.system.orphans import adopt_orphans

REPOSITORY = Path(__file__).parents[2]
MARK = "FARANDOLE_DRILL"
_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
_WORKERS = 2
# What launchers and users set, and what would change how a job starts or how its output looks.
_FOREIGN = re.compile(
    r"FARANDOLE_|HOROVOD_|SLURM_|OMPI_|PMI|TORCHELASTIC_|MASTER_|LOCAL_|RANK$|WORLD_SIZE$|"
    r"OMP_NUM_THREADS$|PYTHONWARNINGS$|COLUMNS$|FORCE_COLOR$"
)

Process = subprocess.Popen[bytes] | Forked


class Slot:
    """Made in a process of its own, which it changes; see `serve` in `book`."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="drills-"))
        self.temporary = self.root / "tmp"
        self.shared = self.root / "shm"
        for folder in (self.temporary, self.shared):
            folder.mkdir()
        self._mark = uuid.uuid4().hex
        _take_shared_memory(self.shared)
        adopt_orphans()
        kept = {key: value for key, value in os.environ.items() if not _FOREIGN.match(key)}
        self._environment = kept | {
            MARK: self._mark,
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(self.temporary),
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "200",
        }
        warm = {**self._environment, **worker_defaults(_WORKERS, alone=True)}
        self._forks = Forks.begin(warm)
        if self._forks is not None and not self._forks.wait():
            self._forks = None
        self._own = {child.pid for child in psutil.Process().children()}

    def start(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        folder: Path,
        output: Path,
        *,
        warm: bool,
    ) -> Process:
        """A job, in a session of its own, typed in `folder`."""
        environment = self._environment | dict(variables)
        late = all(name.startswith("FARANDOLE_") for name in variables)
        with output.open("wb") as sink, Path(os.devnull).open("rb") as nothing:
            if self._forks is not None and warm and late:
                os.chdir(folder)
                with contextlib.suppress(ForkError):
                    streams = [nothing.fileno(), sink.fileno(), sink.fileno()]
                    return self._forks.start(command, environment, streams=streams, serves=True)
            return subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=nothing,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        """All that were started here, by whomever, and still run."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.pid in self._own or process.status() == psutil.STATUS_ZOMBIE:
                return False
            return process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):  # ended meanwhile, or not ours to look at
            return False

    def tidy(self) -> None:
        """After a drill: ends what is left of it, and empties the folders."""
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans that came to us
                pass
        os.chdir(self.root)
        for folder in (self.temporary, self.shared):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        self.tidy()
        if self._forks is not None:
            self._forks.close()
        os.chdir("/")
        shutil.rmtree(self.root, ignore_errors=True)


def _take_shared_memory(folder: Path) -> None:
    """Makes `folder` the /dev/shm of this process and its children; without root, does nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or not hasattr(libc, "unshare") or libc.unshare(_NEW_MOUNTS) != 0:
        return
    for words in (["--make-rprivate", "/"], ["--bind", str(folder), "/dev/shm"]):
        subprocess.run(["mount", *words], check=True)
