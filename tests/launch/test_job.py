"""`farandole run` to a good end: ranks, output, settings, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.worker.environment import is_loopback

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPTS = Path(__file__).parent / "scripts"
LINE = re.compile(r"^\[(\d+)\] (.*)$")


def by_rank(text: str, size: int) -> list[list[str]]:
    """The lines of each rank. Every line must carry one, except that of a host with few cores."""
    lines: list[list[str]] = [[] for _ in range(size)]
    for line in text.splitlines():
        if line.startswith("farandole: warning: host localhost: "):
            continue
        match = LINE.match(line)
        assert match, f"without a rank: {line!r}"
        lines[int(match[1])].append(match[2])
    return lines


def test_three_workers_find_each_other(sandbox: Sandbox) -> None:
    done = sandbox.farandole(
        *("run", "-n", "3", "--name", "try", "--runs", "kept", "--seed", "7"),
        *("--sync", "allreduce:bucket_mib=5", SCRIPTS / "facts.py"),
        *("-n", "9", "--sync", "theirs", "--", "-m", "two words", ""),
    )
    assert done.returncode == 0, done.stderr
    assert by_rank(done.stderr, 3) == [["to standard error"]] * 3
    for rank, lines in enumerate(by_rank(done.stdout, 3)):
        (line,) = lines
        facts = json.loads(line.removeprefix("facts "))
        assert (facts["rank"], facts["size"], facts["sum"]) == (rank, 3, 3.0)
        assert (facts["local"], facts["hosts"]) == ([rank, 3], 1)
        assert facts["script"] == str(SCRIPTS / "facts.py")
        assert facts["arguments"] == ["-n", "9", "--sync", "theirs", "--", "-m", "two words", ""]
        assert (facts["name"], facts["folder"], facts["seed"]) == ("try", "kept/try", 7)
        assert facts["sync"] == "allreduce:bucket_mib=5"
        assert facts["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        for addresses in facts["listening"]:  # the worker and the launcher
            assert addresses  # gloo, and the store
            assert all(map(is_loopback, addresses)), addresses
    assert list(sandbox.temporary.iterdir()) == []
    assert not (sandbox.folder / "kept").exists()  # nothing was logged


def test_a_script_with_a_process_group_of_its_own(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "-n", "2", SCRIPTS / "facts.py", "--own-group")
    assert done.returncode == 0, done.stderr
    for rank, (line,) in enumerate(by_rank(done.stdout, 2)):
        facts = json.loads(line.removeprefix("facts "))
        assert (facts["rank"], facts["size"], facts["sum"]) == (rank, 2, 1.0)
        assert facts["interface"] == "lo"  # fd.init comes too late to choose it
        assert all(map(is_loopback, facts["listening"][0])), facts["listening"]


def test_a_module_and_a_chosen_number_of_threads(sandbox: Sandbox) -> None:
    """And what the worker leaves running ends with the job."""
    (sandbox.folder / "package").mkdir()
    sandbox.script(
        "package/train.py",
        """
import os, subprocess, sys

subprocess.Popen(["sleep", "600"])
print(__name__, __package__, sys.argv[1:], os.environ["OMP_NUM_THREADS"])
""",
    )
    done = sandbox.farandole("run", "-m", "package.train", "-m", "x", OMP_NUM_THREADS="5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[0] __main__ package ['-m', 'x'] 5\n"
    assert sandbox.processes() == []


def test_output_is_whole_and_comes_while_the_workers_run(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "talk.py",
        """
import os, sys, time
from pathlib import Path

print("in", "several", "pieces", "ünd", 1)
while not Path("go").exists():
    time.sleep(0.01)
for number in range(2000):
    print("line", number, "of", 2000)
sys.stdout.buffer.write(b"\\xff no newline at the end")
""",
    )
    job = sandbox.start_farandole("run", "-n", "2", script)
    assert job.stdout is not None
    # Read before the workers may go on: into a pipe, and without PYTHONUNBUFFERED.
    early = [job.stdout.buffer.readline().decode() for _ in range(2)]
    assert sorted(early) == [f"[{rank}] in several pieces ünd 1\n" for rank in (0, 1)]
    (sandbox.folder / "go").touch()
    stdout = job.stdout.buffer.read().decode(errors="replace")
    assert sandbox.finish(job).returncode == 0
    expected = [f"line {number} of 2000" for number in range(2000)]
    expected.append("\ufffd no newline at the end")
    assert by_rank(stdout, 2) == [expected, expected]


def test_a_job_under_nohup_survives_the_end_of_its_terminal(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "wait.py",
        """
import time
from pathlib import Path

Path("ready").touch()
while not Path("go").exists():
    time.sleep(0.01)
""",
    )
    job = sandbox.start(["nohup", sys.executable, "-m", "farandole", "run", script])
    sandbox.wait_until((sandbox.folder / "ready").exists, "the worker runs")
    os.killpg(job.pid, signal.SIGHUP)
    (sandbox.folder / "go").touch()
    assert sandbox.finish(job).returncode == 0


def test_on_a_terminal_rank_0_writes_itself(sandbox: Sandbox) -> None:
    script = sandbox.script("tty.py", "import sys\nprint(sys.stdout.isatty(), sys.stderr.isatty())")
    shown = sandbox.on_terminal([sys.executable, "-m", "farandole", "run", "-n", "2", script])
    lines = [line for line in shown if "none of the 2 workers joined" not in line]
    assert sorted(lines) == ["", "True True", "[1] False False"]


def test_an_unwritable_temporary_folder_is_named(sandbox: Sandbox) -> None:
    script = sandbox.script("empty.py", "")
    # Python falls back on other folders unless a process may not write anywhere.
    limit = 'ulimit -f 0; exec "$0" -m farandole run "$1"'
    done = sandbox.run(["bash", "-c", limit, sys.executable, script])
    assert done.returncode != 0
    assert "TMPDIR" in done.stderr
    assert "Traceback" not in done.stderr
