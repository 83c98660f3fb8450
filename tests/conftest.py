"""Fixtures for tests that start real processes.

Everything a test starts runs in the test's own folder, with its own temporary folder, in an
environment without traces of the job that the tests themselves may run in. It carries a mark, so
that whatever survives the test is found, ended, and held against it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import pty
import re
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
from typing import IO

# These tests run side by side, one a core: further threads in each only wait for their turn, and
# burn time while they do. Said before torch is there to hear it; what a sandbox starts is not told.
os.environ["OMP_NUM_THREADS"] = "1"
# Where a test or a job does have several threads, they sleep while they wait: there are more of
# them than cores, and whoever spins keeps the others from working. Jobs inherit this.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Results are compared with those of CPUs, also where there is a GPU.
if os.environ.get("FARANDOLE_TEST_GPU") != "1":  # those of tests/gpu, by themselves
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# What was measured and checked before is kept in a cache. The tests share one of their own, so that
# they find what this run of them has found, and nothing else. Fonts stay where they are: it takes
# seconds to look for them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ.setdefault("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib"))
    CACHE = tempfile.TemporaryDirectory(prefix="farandole-tests-")
    os.environ["XDG_CACHE_HOME"] = CACHE.name
# Byte code is kept, also where the environment says otherwise: else each worker of the suite
# rewrites the asserts of all tests, and each fresh interpreter compiles the package once more.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A race inside of a test forks nothing from a further process. A sandbox is not told that either.
os.environ["FARANDOLE_FORK"] = "0"

import hypothesis
import psutil
import pytest
import torch

from farandole.emulate import namespaces
from farandole.errors import UserError
from farandole.launch.backends.mpi.one_host import one_host_variables
from tests.support import stand_ins
from tests.support.crashes import keep_stacks, kept_stacks
from tests.support.order import ordered
from tests.support.ports import find_free_port
from tests.support.slurm import SlurmCluster, running_slurm
from tests.support.warm_starts import WarmStarts, fresh_starts

sys.dont_write_bytecode = False  # in this process too, whatever it was started with

# Hypothesis' own limit of time per example would be a timed test: the first one loads torch.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# `torch.manual_seed` also asks for the seeds of devices that may come later, and keeps the whole
# stack of each call as text: a tenth of the time of many tests. No device comes here.
for absent in (torch.cuda, torch.xpu, torch.mtia):
    absent.manual_seed_all = lambda seed: None

# A suite that a shell has started in the background ignores SIGINT, and one behind `nohup` ignores
# SIGHUP, as would all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

REPOSITORY = Path(__file__).parents[1]
WARM_SERVER = Path(__file__).parent / "support" / "warm_server.py"
ROOM_BYTES = 1 << 15
MOST_WORKERS = 12  # each takes a GB
MARK = "FARANDOLE_TEST"
# What launchers and users set, and what would change how a job starts or how its output looks.
FOREIGN = re.compile(
    r"FARANDOLE_|HOROVOD_|SLURM_|PBS_|LSB_|OMPI_|PMI|MPI_|MV2_|TORCHELASTIC_|MASTER_|LOCAL_|ROLE_|GROUP_|RANK$|"
    r"WORLD_SIZE$|OMP_NUM_THREADS$|KMP_|TORCHINDUCTOR_|GLOO_|NCCL_|CUDA_VISIBLE|PYTHONUNBUFFERED$|PYTHONWARNINGS$|"
    r"COLUMNS$|FORCE_COLOR$|NO_COLOR$"
)
PACKAGES = {  # that only some tests need: the module, and how to get it
    "distributed": "pip install distributed",
    "expecttest": "pip install expecttest",
    "h5py": "pip install h5py",
    "jsonschema": "pip install jsonschema",
    "mkdocs": "pip install mkdocs-material",
    "mpi4py": "pip install mpi4py",
    "optuna": "pip install 'farandole[tune]'",
    "pyarrow": "pip install pyarrow",
    "pynvml": "pip install nvidia-ml-py",
    "ray": "pip install ray",
    "sklearn": "pip install scikit-learn",
    "tifffile": "pip install tifffile",
    "tornado": "pip install tornado",
    "zarr": "pip install zarr",
}
PROGRAMS = {  # the same, on the PATH or in root's folders
    "chromium": "Debian: apt install chromium",
    "mpirun": "Debian: apt install openmpi-bin",
    "munged": "Debian: apt install munge",
    "slurmctld": "Debian: apt install slurm-wlm",
    "sshd": "Debian: apt install openssh-server",
}
# They need TensorFlow and JAX, which have an environment of their own: `make test-frontends`.
collect_ignore = [] if find_spec("tensorflow") else ["frontends"]
PATIENCE_SECONDS = 400.0  # a machine that many share may stand still for minutes
# Whoever has heard that its parent is gone (ssh, and what it started) needs a moment to end.
ENDING_SECONDS = 10.0


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


def described(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            words = shlex.join(process.cmdline())
            return f"{process.pid}, {process.status()}, started by {process.ppid()}: {words}"
    except psutil.Error as error:  # ended meanwhile
        return str(error)


def has_ended(process: subprocess.Popen[str], deadline: float) -> bool:
    """Whether it does by then."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    return process.poll() is not None


def require(name: str) -> None:
    """Skips the test where a package or a program is missing; where all must be there, fails it."""
    if name in PROGRAMS:
        path = f"{os.environ['PATH']}:/usr/sbin"
        found = shutil.which(name, path=path)
        message = f"there is no {name} ({PROGRAMS[name]})"
    else:
        found, message = find_spec(name), f"{name} is not installed ({PACKAGES[name]})"
    if found is None:
        give_up = pytest.fail if os.environ.get("FARANDOLE_TEST_REQUIRE") == "all" else pytest.skip
        give_up(message)


def pytest_xdist_auto_num_workers() -> int:
    """How many tests run side by side: three for two cores, since most wait for others at times."""
    return max(2, min(MOST_WORKERS, len(os.sched_getaffinity(0)) * 3 // 2))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, dealt to the workers of pytest-xdist."""
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = ordered(items, lambda item: item.nodeid.partition("::")[0], workers)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end. To look through them again and again for garbage
    took 6 % of the time of tests of layouts."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart() -> None:
    """Whatever these tests start, and what their launchers start, is forked where it can be:
    importing torch takes longer than most of them."""
    WARM.starts.install()
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
        keep_stacks(Path(os.environ["XDG_CACHE_HOME"]), worker)


def pytest_sessionfinish() -> None:
    WARM.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for worker, lines in kept_stacks(Path(os.environ["XDG_CACHE_HOME"])):
        terminalreporter.section(f"worker {worker} died")
        terminalreporter.line("\n".join(lines))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Tests of how processes start (`@pytest.mark.fresh`) get interpreters of their own."""
    marked = item.get_closest_marker("fresh") is not None
    with fresh_starts() if marked else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which may need them too
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "torch.testing._internal.common_utils" in sys.modules:
        # Whoever imported it: it forbids every later test to set torch's backends.
        # `torch.backends` is a wrapper, so the flag is in the globals of its functions alone.
        known = torch.backends.flags_frozen.__globals__
        known["__allow_nonbracketed_mutation_flag"] = True
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(name)


class WarmProcess:
    """The process from which others are forked. It starts with the first of them, `under` some
    command. See `support/warm_server.py`."""

    def __init__(self, under: Sequence[str] = ()) -> None:
        self._under = under
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._folder: Path | None = None
        self.starts = WarmStarts(self._connect)

    def variables(self) -> dict[str, str]:
        """With these, also what programs such as mpirun start is forked from this process; see
        `support/stand_ins.py`."""
        self.starts.begin()
        assert self._folder is not None
        return stand_ins.variables_for(self._folder / "socket", str(REPOSITORY))

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._folder = Path(tempfile.mkdtemp(prefix="fd-warm-"))  # only this user's
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._folder / "socket"))
        listener.listen(100)
        passed = [theirs.fileno(), listener.fileno()]
        room = "." * ROOM_BYTES  # for the command lines and the variables of those that it forks
        with theirs, listener, fresh_starts():
            self._process = subprocess.Popen(
                [*self._under, sys.executable, str(WARM_SERVER), *map(str, passed), room],
                env=clean_environment("") | {"ROOM": room},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=passed,
            )
        self._connection = ours
        return ours

    def close(self) -> None:
        if self._process is not None and self._connection is not None:
            self._connection.close()  # which it takes for the end
            self._process.wait(PATIENCE_SECONDS)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


WARM = WarmProcess()


class Sandbox:
    """Starts processes in `folder` and knows which of them are still there."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder = folder
        self.temporary = temporary
        self.mark = uuid.uuid4().hex
        self.environment = clean_environment(self.mark) | {"TMPDIR": str(temporary)}

    def start(
        self,
        command: Sequence[str | Path],
        stdout: IO[str] | int = subprocess.PIPE,
        stderr: IO[str] | int = subprocess.PIPE,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """In a session of its own, so that a signal to it reaches nobody else."""
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
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

    def on_terminal(self, command: Sequence[str | Path]) -> list[str]:
        """Runs `command` to its end, and returns the lines that it wrote to a terminal."""
        outside, inside = pty.openpty()
        process = self.start(command, inside, inside)
        os.close(inside)
        assert process.wait(PATIENCE_SECONDS) == 0
        shown = os.read(outside, 10_000).decode()
        os.close(outside)
        return shown.split("\r\n")

    def python(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A fresh interpreter, with all that its start-up does; `fork` is sooner there."""
        with fresh_starts():
            process = self.start([sys.executable, *arguments], **variables)
        return self.finish(process)

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
        command = [sys.executable, *map(str, arguments)]
        if not under:
            return self._run_ranks(command, ranks)
        warm = WarmProcess(under)
        try:
            with warm.starts.installed():
                return self._run_ranks(command, ranks)
        finally:
            warm.close()

    def _run_ranks(
        self, command: Sequence[str], ranks: Sequence[Mapping[str, str]]
    ) -> list[subprocess.CompletedProcess[str]]:
        """All to their end. They write to files: nobody reads the one's while the other waits."""
        with contextlib.ExitStack() as stack:
            files = [
                [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in ranks
            ]
            processes = [
                self.start(command, stdout=out, stderr=err, **variables)
                for variables, (out, err) in zip(ranks, files, strict=True)
            ]
            deadline = time.monotonic() + PATIENCE_SECONDS
            running = [process for process in processes if not has_ended(process, deadline)]
            for process in running:
                process.kill()
            for file in itertools.chain(*files):
                file.seek(0)
            texts = [(out.read(), err.read()) for out, err in files]
        if running:
            pytest.fail(f"{command} did not end.\n{texts}")
        return [
            subprocess.CompletedProcess(command, process.wait(), *text)
            for process, text in zip(processes, texts, strict=True)
        ]

    def farandole(
        self, *arguments: str | Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The command to its end."""
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
        return [process for process in psutil.process_iter() if mark_of(process) == self.mark]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"in {PATIENCE_SECONDS:g} s never: {what}"
            time.sleep(0.02)

    def wait_until_gone(self) -> None:
        self.wait_until(lambda: not self.processes(), f"all gone; left: {self.processes()}")


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    # A short path: Open MPI keeps sockets below its temporary folder.
    temporary = Path(tempfile.mkdtemp(prefix="fd-"))
    place = Sandbox(tmp_path, temporary)
    yield place
    left = place.processes()
    deadline = time.monotonic() + ENDING_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = place.processes()
    what = [described(process) for process in left]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10)
    shutil.rmtree(temporary, ignore_errors=True)
    assert not left, f"the test left processes behind: {what}"


@pytest.fixture
def only_ray() -> Iterator[None]:
    """The only test on this machine with a Ray cluster: Ray finds those of all others by itself."""
    with Path(os.environ["XDG_CACHE_HOME"], "only-ray").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def free_port() -> str:
    return str(find_free_port())


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
        text = (REPOSITORY / "README.md").read_text()
        lines = text.split("## Try it")[1].split("\n## ")[0].splitlines()
        (line,) = (line for line in lines if line.startswith(f"farandole {name}"))
        return shlex.split(line, comments=True)[1:]

    return words


@pytest.fixture(scope="session")
def warm_variables() -> dict[str, str]:
    """With these, what programs such as mpirun, srun and ssh start is forked from a process that
    has torch imported. Not for tests of how processes start, or who ends with whom."""
    return WARM.variables()


@pytest.fixture(scope="session")
def mpirun(warm_variables: dict[str, str]) -> list[str]:
    """How to start a real `mpirun` here, as root and with more ranks than cores."""
    require("mpirun")
    found = shutil.which("mpirun")
    assert found is not None
    told = one_host_variables({}) | warm_variables
    variables = [f"{name}={value}" for name, value in told.items()]
    words = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    return ["env", *variables, found, *words]


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """A real Slurm with the nodes `one` and `two`."""
    require("slurmctld")
    require("munged")
    with running_slurm() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def root() -> None:
    """Skips where no network namespace can be made: that needs root, and `ip` and `tc`."""
    try:
        namespaces.require_root()
    except UserError as error:
        pytest.skip(str(error))
