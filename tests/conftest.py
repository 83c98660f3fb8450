"""Fixtures for tests that start real processes.

Everything a test starts runs in the test's own folder, with its own temporary folder, in an
environment without traces of the job that the tests themselves may run in. It carries a mark, so
that whatever survives the test is found, ended, and held against it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

# These tests run side by side, one a core: further threads in each only wait for their turn, and
# burn time while they do. Said before torch is there to hear it; what a sandbox starts is not told.
os.environ["OMP_NUM_THREADS"] = "1"
# Results are compared with those of CPUs, also where there is a GPU.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A race inside of a test forks nothing from a further process. A sandbox is not told that either.
os.environ["FARANDOLE_FORK"] = "0"

import hypothesis
import psutil
import pytest

from farandole.emulate import namespaces
from farandole.errors import UserError
from farandole.launch.one_host_mpi import one_host_variables

# Hypothesis' own limit of time per example would be a timed test: the first one loads torch.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A suite that a shell has started in the background ignores SIGINT, as would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parents[1]
FORKED = Path(__file__).parent / "scripts" / "forked.py"
MARK = "FARANDOLE_TEST"
# What launchers and users set, and what would change how a job starts or how its output looks.
FOREIGN = re.compile(
    r"FARANDOLE_|HOROVOD_|SLURM_|OMPI_|PMI|MPI_|MV2_|TORCHELASTIC_|MASTER_|LOCAL_|ROLE_|GROUP_|RANK$|"
    r"WORLD_SIZE$|OMP_NUM_THREADS$|GLOO_|NCCL_|CUDA_VISIBLE|PYTHONUNBUFFERED$|PYTHONWARNINGS$|"
    r"COLUMNS$|FORCE_COLOR$|NO_COLOR$"
)
SLOW_TO_IMPORT = ("torch._dynamo", "sklearn.datasets")  # every optimizer imports the former
PACKAGES = {  # that only some tests need: the module, and how to get it
    "expecttest": "pip install expecttest",
    "mkdocs": "pip install mkdocs-material",
    "mpi4py": "pip install mpi4py",
    "sklearn": "pip install scikit-learn",
}
PROGRAMS = {"mpirun": "Debian: apt install openmpi-bin"}
PATIENCE_SECONDS = 400.0  # a machine that many share may stand still for minutes


def clean_environment(mark: str) -> dict[str, str]:
    """Ours, without what would change how a job goes."""
    return {
        **{key: value for key, value in os.environ.items() if not FOREIGN.match(key)},
        MARK: mark,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
    }


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):  # ended meanwhile, or not ours to look at
        return None


def require(name: str) -> None:
    """Skips the test where a package or a program is missing; where all must be there, fails it."""
    if name in PROGRAMS:
        found, message = shutil.which(name), f"there is no {name} ({PROGRAMS[name]})"
    else:
        found, message = find_spec(name), f"{name} is not installed ({PACKAGES[name]})"
    if found is None:
        give_up = pytest.fail if os.environ.get("FARANDOLE_TEST_REQUIRE") == "all" else pytest.skip
        give_up(message)


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which may need them too
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(name)


class Forks:
    """A process that has imported torch, and forks others that need not.

    It starts with the first of them, `under` some command. See `scripts/forked.py`.
    """

    def __init__(self, under: Sequence[str] = ()) -> None:
        self.mark = uuid.uuid4().hex  # of whatever is forked: what it says itself is not seen
        modules = [name for name in SLOW_TO_IMPORT if find_spec(name.split(".")[0]) is not None]
        self._command = [*under, sys.executable, str(FORKED), *modules]
        self._environment = clean_environment(self.mark)
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        folder: Path,
        variables: Mapping[str, str],
        ranks: Sequence[Mapping[str, str]],
        arguments: Sequence[str],
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a script on ranks that each have some variables more, all to their end."""
        codes = self._ask(
            {"folder": str(folder), "variables": variables, "ranks": ranks, "arguments": arguments}
        )
        files = [[folder / f"{rank}.{end}" for end in ("out", "err")] for rank in range(len(ranks))]
        texts = [[file.read_text() for file in pair if file.exists()] for pair in files]
        if not codes:
            pytest.fail(f"{arguments} did not end.\n{texts}")
        for file in itertools.chain(*files):  # what is left in the folder is the scripts' doing
            file.unlink()
        return [
            subprocess.CompletedProcess(arguments, code, *text)
            for code, text in zip(codes, texts, strict=True)
        ]

    def _ask(self, request: Mapping[str, object]) -> list[int]:
        """The exit codes; none if the ranks did not end, and all are ended now."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        asked, told = self._process.stdin, self._process.stdout
        assert asked is not None
        assert told is not None
        codes = None
        try:
            asked.write(json.dumps(request) + "\n")
            asked.flush()
            if select.select([told], [], [], PATIENCE_SECONDS)[0]:
                codes = json.loads(told.readline())
        finally:
            if codes is None:  # whatever it may say later is no answer to the next request
                self.close()
        return codes or []

    def is_own(self, process: psutil.Process) -> bool:
        """Whether it is one that was forked here."""
        itself = self._process is not None and process.pid == self._process.pid
        return not itself and mark_of(process) == self.mark

    def close(self) -> None:
        """Ends it, and what it has forked."""
        if self._process is None:
            return
        for process in psutil.process_iter():
            if mark_of(process) == self.mark:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self._process.communicate()
        self._process = None


class Sandbox:
    """Starts processes in `folder` and knows which of them are still there."""

    def __init__(self, folder: Path, temporary: Path, forks: Forks) -> None:
        self.folder = folder
        self.temporary = temporary
        self.mark = uuid.uuid4().hex
        self.environment = clean_environment(self.mark) | {"TMPDIR": str(temporary)}
        self._forks = forks

    def start(self, command: Sequence[str | Path], **variables: str) -> subprocess.Popen[str]:
        """In a session of its own, so that a signal to it reaches nobody else."""
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, command: Sequence[str | Path], **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(command, **variables))

    @staticmethod
    def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        """Waits for the end of `process`. If it does not come, shows what was written so far."""
        try:
            stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            pytest.fail(f"{process.args} did not end.\n{stdout}\n{stderr}")
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def python(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A fresh interpreter, with all that its start-up does; `fork` is sooner there."""
        return self.run([sys.executable, *arguments], **variables)

    def fork(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A script, or -m and a module, in a process in which torch is imported already."""
        (end,) = self.by_hand([variables], *arguments)
        return end

    def by_hand(
        self,
        ranks: Sequence[Mapping[str, str]],
        *arguments: str | Path,
        under: Sequence[str] = (),
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a script on ranks that are each told by some variables; all `under` some command."""
        words = [str(argument) for argument in arguments]
        if not under:
            return self._forks.run(self.folder, self.environment, ranks, words)
        forks = Forks(under)
        try:
            return forks.run(self.folder, self.environment, ranks, words)
        finally:
            forks.close()

    def farandole(
        self, *arguments: str | Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The command to its end. What it starts are fresh interpreters; it is forked itself."""
        return self.fork("-m", "farandole", *arguments, **variables)

    def start_farandole(self, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
        """The command as a shell starts it."""
        return self.start([sys.executable, "-m", "farandole", *arguments], **variables)

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def processes(self) -> list[psutil.Process]:
        """All that were started here, by whomever, and are still running."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        return mark_of(process) == self.mark or self._forks.is_own(process)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"in {PATIENCE_SECONDS:g} s never: {what}"
            time.sleep(0.02)

    def wait_until_gone(self) -> None:
        self.wait_until(lambda: not self.processes(), f"all gone; left: {self.processes()}")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """One for all tests of this process: importing torch once takes as long as many of them."""
    process = Forks()
    yield process
    process.close()


@pytest.fixture
def sandbox(tmp_path: Path, forks: Forks) -> Iterator[Sandbox]:
    # A short path: Open MPI keeps sockets below its temporary folder.
    temporary = Path(tempfile.mkdtemp(prefix="fd-"))
    place = Sandbox(tmp_path, temporary, forks)
    yield place
    left = place.processes()
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(temporary, ignore_errors=True)
    assert not left, f"the test left processes behind: {left}"


@pytest.fixture
def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def two_ranks(free_port: str) -> list[dict[str, str]]:
    """For `Sandbox.by_hand`: the variables by which two ranks find each other."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": free_port}
    return [common | {"RANK": rank} for rank in ("0", "1")]


@pytest.fixture
def farandole_cli(sandbox: Sandbox) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`farandole_cli("run", "-n", "2", script)`: runs the command in a clean place, to its end."""
    return sandbox.farandole


@pytest.fixture(scope="session")
def readme_command() -> Callable[[str], list[str]]:
    """`readme_command("bench comm")`: the words of that command in the README, less `farandole`.

    For tests that ask more of it than that it works, and so need not start it a second time.
    """

    def words(name: str) -> list[str]:
        lines = (REPOSITORY / "README.md").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(f"farandole {name}"))
        return shlex.split(line, comments=True)[1:]

    return words


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """How to start a real `mpirun` here, as root and with more ranks than cores."""
    require("mpirun")
    found = shutil.which("mpirun")
    assert found is not None
    variables = [f"{name}={value}" for name, value in one_host_variables({}).items()]
    words = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return ["env", *variables, found, *words]


@pytest.fixture(scope="session")
def root() -> None:
    """Skips where no network namespace can be made: that needs root, and `ip` and `tc`."""
    try:
        namespaces.require_root()
    except UserError as error:
        pytest.skip(str(error))
