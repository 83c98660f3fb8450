"""`farandole race`, with real runs of a tiny script."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from farandole.cli import main
from farandole.report.history import History, Point

PATIENCE_SECONDS = 150.0
SCRIPT = """
import sys, time, farandole as fd
run = fd.init()
print("seed", run.seed, "sync", run.settings.sync)
mixed = "--mixed" in sys.argv
if mixed and str(run.settings.sync) == "allreduce:algorithm=ring":
    raise ValueError("no luck today")
for step in range(3):
    if "--slow" in sys.argv:
        time.sleep(30)
    if mixed and run.size > 1:
        run.mean(1.0)
    if not mixed or run.size > 1:
        run.log(epoch=step, accuracy=0.3 * (step + 1), loss=1.0 / (step + 1))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "tiny.py").write_text(SCRIPT)
    return tmp_path / "tiny.py"


def summary(script: Path) -> dict:
    (path,) = script.parent.glob("runs/race-tiny-*/summary.json")
    return json.loads(path.read_text())


def test_lanes_that_crash_and_say_nothing_are_shown_and_the_rest_go_on(sandbox, script):
    """In one race. That all go well: tests/docs/test_readme.py, by `make race`."""
    syncs = ("--sync", "allreduce:algorithm=ring", "--sync", "allreduce:bucket_mib=2", "--serial")
    done = sandbox.farandole(
        "race", "-n", "2", *syncs, "--target", "accuracy=0.5", "--seed", "7",
        "--trace", "--price", "3600", script.name, "--mixed", COLUMNS="120",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no luck today" in done.stdout
    assert "did it call run.log(" in done.stdout
    assert "reached accuracy ≥ 0.5 first" in done.stdout
    assert {lane["sync"]: lane["outcome"] for lane in summary(script)["lanes"]} == {
        "serial": "unfinished",
        "allreduce:algorithm=ring": "failed",
        "allreduce:bucket_mib=2": "ok",
    }
    (ok,) = (lane for lane in summary(script)["lanes"] if lane["outcome"] == "ok")
    assert ok["startup_seconds"] > 0
    assert "until fd.init() was done" in done.stdout
    (folder,) = script.parent.glob("runs/race-tiny-*")
    assert {p.name for p in folder.iterdir()} >= {"report.html", "report.png", "summary.json"}
    outputs = {p.parent.name: p.read_text() for p in folder.glob("*/output.log")}
    assert "[1] seed 7 sync allreduce:bucket_mib=2" in outputs["3-allreduce-bucket-mib-2"]
    assert "seed 7 sync None" in outputs["1-serial"]
    assert "report.html" in done.stdout
    assert ok["cost_to_target"] == pytest.approx(2 * ok["seconds_to_target"])
    lane = folder / "3-allreduce-bucket-mib-2"
    events = json.loads((lane / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}
    for rank in range(2):
        (last,) = (lane / "memory" / f"rank-{rank}.jsonl").read_text().splitlines()[-1:]
        assert json.loads(last)["process_bytes"] > 50 * 2**20
    page = (folder / "report.html").read_text()
    assert "no luck today" in page, "it says why a lane has failed"
    assert '"waits":[' in page
    assert "<span>rank 1</span>" in page


def test_a_script_that_never_joins_is_named_as_the_cause(sandbox):
    script = sandbox.script("alone.py", "print('trained')")
    done = sandbox.farandole("race", "-n", "2", "--sync", "allreduce", script.name, COLUMNS="200")
    assert done.returncode == 1
    assert "the script never called fd.init()" in done.stdout
    assert "did it call run.log(" not in done.stdout
    (output,) = sandbox.folder.glob("runs/race-alone-*/1-allreduce/output.log")
    assert "none of the 2 workers joined the others" in output.read_text()
    assert not list(output.parent.glob(".joined"))


def test_a_target_that_is_never_logged_ends_the_race_after_one_lane(sandbox, script):
    done = sandbox.farandole(
        "race", "-n", "1", "--serial", "--sync", "allreduce", "--target", "acuracy=1", script.name
    )
    assert done.returncode == 2
    assert "acuracy" in done.stderr
    assert "'accuracy'" in done.stderr
    assert "allreduce on" not in done.stdout, "the second lane never started"
    assert "--target asks for acuracy, and the script has logged" in done.stdout


def test_that_the_target_is_not_logged_is_said_while_the_lane_runs(script, monkeypatch, capsys):
    said = []

    def logs_once(config, entry, number):
        lane = config.lane(entry)
        yield replace(lane, outcome="running")
        said.append(capsys.readouterr().out)
        point = Point(time_seconds=1.5, metrics={"accuracy": 0.5, "loss": 0.1})
        history = History(points=(point,), last=point)
        yield replace(lane, outcome="running", history=history)
        said.append(capsys.readouterr().out)
        yield replace(lane, outcome="ok", history=replace(history, finished=True))

    monkeypatch.chdir(script.parent)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("farandole.race.runner.run_lane", logs_once)
    arguments = ["race", "-n", "1", "--serial", "--target", "acuracy=0.9", "tiny.py"]
    monkeypatch.setattr(sys, "argv", ["farandole", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end:
        main()
    signal.signal(signal.SIGTERM, before)
    assert end.value.code == 2
    assert "acuracy" not in said[0]
    assert "asks for acuracy, and the script has logged accuracy, loss. Did you mean" in said[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("-n", "0", "--serial", "tiny.py"), "-n 0"),
        (("-n", "2", "tiny.py"), "needs lanes"),
        (("tiny.py", "-n", "2", "--serial"), "-n after the script is the script's own"),
        (("-n", "2", "tiny.py", "--sync=allreduce"), "--sync after the script is the script's own"),
        (("-n", "2", "--serial", "tony.py"), "Did you mean 'tiny.py'?"),
        (("-n", "2", "--sync", "alreduce", "tiny.py"), "Did you mean 'allreduce'?"),
        (("-n", "2", "--sync", "allreduce:buckets=1", "tiny.py"), "Did you mean 'bucket_mib'?"),
        (("-n", "2", "--serial", "--target", "accuracy", "tiny.py"), "METRIC=VALUE"),
        (("-n", "2", "--serial", "--stall", "0", "tiny.py"), "--stall 0"),
        (("-n", "2", "--serial", "--grace", "-1", "tiny.py"), "--grace -1"),
    ],
)
def test_bad_input(script, arguments, complaint, monkeypatch, capsys):
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(sys, "argv", ["farandole", "race", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not list(script.parent.glob("runs/*"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_stopping_a_race_leaves_no_process(script, sent):
    process = subprocess.Popen(
        [sys.executable, "-m", "farandole", "race", "-n", "2", "--sync", "allreduce", script.name,
         "--slow"],
        cwd=script.parent,
        env={name: value for name, value in os.environ.items() if name != "FARANDOLE_FORK"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )  # fmt: skip

    def workers() -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if _works_in(p, script)]

    try:
        _wait_for(lambda: len(workers()) >= 4, "the race, its lane and two workers")
        process.send_signal(sent)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
    _wait_for(lambda: not workers(), "the end of all processes")
    if sent != signal.SIGKILL:
        assert process.returncode == 128 + sent
        assert "report.html" in output, "what was run so far is reported"


def _works_in(process: psutil.Process, script: Path) -> bool:
    try:
        return process.cwd() == str(script.parent)
    except psutil.Error:
        return False


def _wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:g} s for {what}"
        time.sleep(0.1)
