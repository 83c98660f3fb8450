"""`farandole horovodrun`: every flag does what it says, or says that it does nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.cli import main
from farandole.horovod.cli import elastic, start
from farandole.horovod.cli.variables import NO_EFFECT
from farandole.launch.backends.mpi.command import mpi_words
from farandole.launch.backends.ssh.channel import Ssh
from farandole.launch.job import Job, Outcome
from farandole.launch.policies.elastic.job import ElasticJob
from farandole.topology import Topology

if TYPE_CHECKING:
    from conftest import Sandbox

Command = Callable[..., tuple[int, str]]
HOROVOD = re.compile(r"HOROVOD_(?!RANK|SIZE|LOCAL|CROSS|HOSTNAME)")


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs horovodrun in this process, in an empty folder; its exit code and what it says."""
    monkeypatch.chdir(tmp_path)
    for name in ("HOROVOD_START_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["farandole", "horovodrun", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.err + captured.out

    return run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that would have been launched, with where and how."""
    calls: list[Any] = []

    def launch(
        job: Job,
        topology: Topology,
        ssh: Ssh,
        interfaces: tuple[str, ...],
        *,
        connect_seconds: float,
    ) -> Outcome:
        assert connect_seconds > ssh.connect_seconds
        calls.append((job, topology, ssh, interfaces))
        return Outcome()

    def launch_elastic(job: ElasticJob) -> Outcome:
        calls.append(job)
        return Outcome()

    monkeypatch.setattr(start, "launch_on_hosts", launch)
    monkeypatch.setattr(elastic, "launch_elastic", launch_elastic)
    return calls


def variables(job: Job | ElasticJob) -> dict[str, str]:
    return {key: value for key, value in job.environment.items() if HOROVOD.match(key)}


PYTHON = (sys.executable, "train.py", "-np", "9")


def test_the_usual_line(command: Command, started: list[Any]) -> None:
    assert command("-np", "4", "-H", "localhost:4", *PYTHON) == (0, "")
    ((job, topology, ssh, interfaces),) = started
    assert (job.program, job.command) == (sys.executable, ("train.py", "-np", "9"))
    assert (str(topology), ssh, interfaces) == ("localhost: 0-3", Ssh(), ())
    assert [assignment["HOROVOD_RANK"] for assignment in job.per_rank] == ["0", "1", "2", "3"]
    assert variables(job) == {}
    assert job.environment["PYTHONPATH"].split(":")[0].endswith("farandole/horovod/shim")


def test_flags_become_the_variables_that_workers_read(
    command: Command, started: list[Any], tmp_path: Path
) -> None:
    assert command(
        *("--num-proc", "1", "--gloo", "--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5"),
        *("--cache-capacity", "0", "--timeline-filename", "t.json", "--timeline-mark-cycles"),
        *("--no-stall-check", "--stall-check-warning-time-seconds", "5"),
        *("--stall-check-shutdown-time-seconds", "9", "--gloo-timeout-seconds", "77"),
        *("--log-level", "debug", "--autotune", "--autotune-log-file", "tune.csv", *PYTHON),
    ) == (0, "")
    assert variables(started[0][0]) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20),
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_CACHE_CAPACITY": "0",
        "HOROVOD_TIMELINE": str(tmp_path / "t.json"),
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "77",
        "HOROVOD_LOG_LEVEL": "DEBUG",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(tmp_path / "tune.csv"),
    }


def test_a_configuration_file_and_the_command_line_above_it(
    command: Command, started: list[Any], tmp_path: Path
) -> None:
    settings = tmp_path / "horovod.yaml"
    settings.write_text(
        "# ours\nparams:\n  fusion_threshold_mb: 8  # MB\n  cycle-time-ms: 2\n"
        "stall_check:\n  enabled: false\nlogging:\n  level: 'info'\nautotune:\n  enabled: no\n"
        "library_options:\n  num_nccl_streams: 2\n"
    )
    arguments = ("-np", "1", "--config-file", "horovod.yaml", "--cycle-time-ms", "7", *PYTHON)
    code, said = command(*arguments)
    assert (code, said.count("\n")) == (0, 1)
    assert said.startswith("horovodrun: --num-nccl-streams has no effect: ")
    assert variables(started[0][0]) == {
        "HOROVOD_FUSION_THRESHOLD": str(8 * 2**20),
        "HOROVOD_CYCLE_TIME": "7.0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_AUTOTUNE": "0",
    }
    for text, problem in (
        ("params:\n  fusion: 8\n", "line 2: there is no setting 'params.fusion'. Did you mean"),
        ("params:\n  cycle_time_ms: soon\n", "line 2: params.cycle_time_ms cannot be 'soon'"),
        ("stall_check:\n  enabled: maybe\n", "line 2: stall_check.enabled cannot be 'maybe'"),
        ("params: {cycle_time_ms: [2]}\n", "line 1: cycle_time_ms must be a single value"),
        ("- params\n", "line 1: here must be sections such as `params:`"),
        ("params: 3\n", "line 1: here must be sections such as `params:`"),
        ("params:\n  - fusion_threshold_mb\n", "line 2: here must be sections"),
        ("params:\n  cycle_time_ms: 2\n bad\n", "line 3 is no YAML"),
        (
            "params:\n  cycle_time_ms: !!python/name:os.system\n",
            "line 2: params.cycle_time_ms cannot",
        ),
    ):
        settings.write_text(text)
        code, said = command(*arguments)
        assert code == 2
        assert f"horovod.yaml, {problem}" in said
    assert len(started) == 1
    for text in (
        "params: {cycle_time_ms: 2, fusion_threshold_mb: 8}\n",
        "--- {}\n",
        "",
        "params:\n",
    ):
        settings.write_text(text)
        assert command(*arguments)[0] == 0
    assert variables(started[1][0]) == {
        "HOROVOD_CYCLE_TIME": "7.0",
        "HOROVOD_FUSION_THRESHOLD": str(8 * 2**20),
    }


def test_flags_without_effect_say_why(command: Command, started: list[Any]) -> None:
    code, said = command(
        *("-np", "1", "--disable-cache", "--tcp", "--hierarchical-allreduce", "--autotune"),
        *("--no-hierarchical-allgather", "--mpi-threads-disable", "--log-without-timestamp"),
        *("--num-nccl-streams", "2", "--thread-affinity", "1", "--autotune-warmup-samples", "3"),
        *("--autotune-steps-per-sample", "3", "--autotune-bayes-opt-max-samples", "3"),
        *("--autotune-gaussian-process-noise", "0.5", "--blacklist-cooldown-range", "1", "2"),
        *("--mpi-args", "-x A", "--binding-args", "x", "--ssh-port", "22", "-i", "key"),
        *("--network-interface", "lo", "--start-timeout", "9", "--max-np", "3"),
        *("--slots-per-host", "2", "--reset-limit", "2", "--elastic-timeout", "5", *PYTHON),
    )
    assert (code, len(started)) == (0, 1)
    told = re.findall(r"^horovodrun: (--\S+) has no effect: \S.*$", said, re.MULTILINE)
    assert len(told) == said.count("\n") == len(set(told))
    # Those that ask for what is so anyway, with --no-… and --…-without-…, say nothing.
    quiet = {"--hierarchical-allgather", "--log-with-timestamp", "--log-hide-timestamp"}
    others = {"--mpi-args", "--binding-args", "--ssh-port", "--ssh-identity-file", "--max-np"}
    others |= {"--network-interfaces", "--start-timeout", "--slots-per-host", "--reset-limit"}
    assert set(told) == {start.spelling(name) for name in NO_EFFECT} - quiet | others | {
        "--elastic-timeout"
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-np", "2"), "what shall the workers run?"),
        (PYTHON, "-np is missing"),
        (("-np", "0", *PYTHON), "-np 0: a job needs at least 1 worker"),
        (("-np", "3", "-H", "localhost:2", *PYTHON), "3 workers on 2 slots (localhost:2)"),
        (("-np", "1", "-H", "a:x", *PYTHON), "-H: 'a:x' is no host with slots"),
        (("-np", "1", "-H", "a:1", "-hostfile", "b", *PYTHON), "--hosts and --hostfile: give one"),
        (("-np", "1", "--gloo", "--mpi", *PYTHON), "--gloo and --mpi: choose one"),
        (("-np", "1", "--jsrun", *PYTHON), "--jsrun is not supported"),
        (("-np", "1", "train.py"), "there is no program 'train.py' to run. A script needs its"),
        (("-np", "1", "--cycle-time-ms", "-1", *PYTHON), "--cycle-time-ms -1.0: it must be 0"),
        (("-np", "1", "--log-level", "LOUD", *PYTHON), "'LOUD' is not one of"),
        (("-np", "1", "--config-file", "none.yaml", *PYTHON), "none.yaml cannot be read"),
        (("-np", "1", "--min-np", "1", *PYTHON), "an elastic job needs hosts that can change"),
        (("-np", "1", "--min-np", "1", "--mpi", *PYTHON), "the workers of mpirun cannot change"),
    ],
)
def test_what_cannot_be(
    command: Command, started: list[Any], arguments: tuple[str, ...], message: str
) -> None:
    code, said = command(*arguments)
    assert code == 2
    assert message in said
    assert not started


def test_other_hosts(command: Command, started: list[Any], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("far.invalid slots=2\nlocalhost slots=2\n")
    assert command(
        *("-np", "3", "-hostfile", "hosts", "-p", "2222", "-i", "key", "--start-timeout", "9"),
        *("--network-interfaces", "eth0,eth1", "--network-interface", "eth0", "-prefix-timestamp"),
        *("--output-filename", "kept", *PYTHON),
    ) == (0, "")
    ((job, topology, ssh, interfaces),) = started
    assert str(topology) == "far.invalid: 0-1, localhost: 2"
    assert (ssh, interfaces) == (Ssh(2222, Path("key"), 9), ("eth0", "eth1"))
    assert job.per_rank[2]["HOROVOD_CROSS_RANK"] == "1"
    assert (job.output, job.timed_output) == (Path("kept"), True)


def test_an_elastic_job(command: Command, started: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    assert command(
        *("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", "hosts.sh"),
        *("--slots-per-host", "3", "--reset-limit", "5", "--elastic-timeout", "60"),
        *("--fusion-threshold-mb", "1", "-p", "2222", "--network-interface", "lo", *PYTHON),
    ) == (0, "")
    (job,) = started
    assert (job.channel, job.interfaces) == (Ssh(2222), ("lo",))
    assert (job.min_workers, job.workers, job.max_workers) == (1, 2, 4)
    assert (job.reset_limit, job.start_timeout_seconds) == (5, 60)
    assert (tuple(job.command), job.whole_command) == (PYTHON, True)
    assert job.discover() == {"localhost": 3}
    assert variables(job) == {"HOROVOD_FUSION_THRESHOLD": str(2**20)}
    assert command("-np", "1", "--min-np", "1", "-H", "localhost:2,127.0.0.1:1", *PYTHON)[0] == 0
    assert started[1].discover() == {"localhost": 3}
    assert started[1].max_workers is None
    code, said = command(
        *("-np", "1", "--min-np", "1", "-H", "localhost:1", "--output-filename", "kept", *PYTHON)
    )
    assert code == 0
    assert said.startswith("horovodrun: --output-filename has no effect: workers of an elastic")


def test_what_is_here_and_which_version(command: Command) -> None:
    code, said = command("--check-build")
    assert code == 0
    for line in ("Available Frameworks:", "    [X] PyTorch", "    [ ] TensorFlow", "    [X] Gloo"):
        assert line in said.splitlines()
    assert command("-cb")[1] == said
    assert re.fullmatch(r"0\.28\.1 \(Farandole [\d.]+\)\n", command("-v")[1])


def test_the_command_line_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "x")
    words = mpi_words(
        "mpirun",
        Topology.from_names(["a", "a", "b"]),
        ["python", "train.py"],
        {"HOROVOD_CYCLE_TIME": "2"},
        ssh=Ssh(22, Path("my key")),
        interfaces=("eth0",),
        mpi_args="--mca x 'y z'",
        binding_args="--bind-to core",
    )
    text = "\n".join(words)
    for part in ("-np 3 -H a:2,b:1 --bind-to core", "-x HOROVOD_CYCLE_TIME", "-x OF_THE_USER"):
        assert part.replace(" ", "\n") in text
    assert words[words.index("plm_rsh_args") + 1] == "-p 22 -i 'my key'"
    assert words[-5:] == ["--mca", "x", "y z", "python", "train.py"]


FACTS = """
import json, os, sys
import torch
import horovod.torch as hvd

hvd.init()
facts = {name: getattr(hvd, name)() for name in
         ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")}
facts["told"] = os.environ.get("HOROVOD_LOCAL_RANK")
facts["sum"] = hvd.allreduce(torch.ones(2) * (hvd.rank() + 1), op=hvd.Sum).tolist()
sys.stdout.write(f"facts {json.dumps(facts)} {sys.argv[1:]}\\n")
"""


def test_a_job_for_real(sandbox: Sandbox) -> None:
    script = sandbox.script("train.py", FACTS)
    done = sandbox.farandole(
        *("horovodrun", "-np", "2", "--output-filename", "kept", "--verbose"),
        *(sys.executable, script, "-v", "two words"),
    )
    assert done.returncode == 0, done.stderr
    assert "ranks by host: localhost: 0-1" in done.stderr
    for rank in (0, 1):
        kept = (sandbox.folder / "kept" / f"rank.{rank}" / "stdout").read_text()
        assert f"[{rank}] {kept}" in done.stdout
        found, arguments = re.fullmatch(r"facts (\{.*\}) (.*)\n", kept).groups()
        facts = json.loads(found)
        assert (facts["rank"], facts["size"], facts["sum"]) == (rank, 2, [3.0, 3.0])
        assert (facts["local_rank"], facts["local_size"]) == (rank, 2)
        assert (facts["cross_rank"], facts["cross_size"], facts["told"]) == (0, 1, str(rank))
        assert arguments == "['-v', 'two words']"


@pytest.mark.mpi
@pytest.mark.usefixtures("mpirun")
def test_a_job_by_mpirun(sandbox: Sandbox, warm_variables: dict[str, str]) -> None:
    script = sandbox.script("train.py", FACTS)
    done = sandbox.farandole(
        *("horovodrun", "-np", "2", "--mpi", "--mpi-args=--oversubscribe", "--verbose"),
        *("--cycle-time-ms", "2", sys.executable, script),
        **warm_variables,
    )
    assert done.returncode == 0, done.stderr
    assert "-x HOROVOD_CYCLE_TIME" in done.stderr
    assert done.stdout.count('"sum": [3.0, 3.0]') == 2
