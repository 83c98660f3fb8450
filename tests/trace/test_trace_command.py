"""`farandole run --trace`: one file for all ranks, however the job ends, that Perfetto opens."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from farandole.cli import main
from farandole.comm.meter import ring_bytes
from farandole.launch import launcher
from farandole.trace import merge as tracing
from farandole.trace.chrome import TraceFile, read_part
from farandole.worker.failure import Failure

if TYPE_CHECKING:
    from conftest import Sandbox

TRAINING = """
import os, platform, sys, time
from pathlib import Path

hosts, rank = "--hosts" in sys.argv, int(os.environ.get("RANK", 0))
if hosts:  # each rank on a host of its own, whose clock was started at another time
    platform.node = lambda: f"host-{rank}"
    true_clock, skew = time.perf_counter_ns, rank * 3_600_000_000_000
    time.perf_counter_ns = lambda: true_clock() + skew

import torch, torch.nn.functional as F
import farandole as fd

run = fd.init(name="traced", timeout=150)
with run.group.trace.span("joined", "test"):  # the meter counts from here
    pass
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
model, opt = run.distribute(model, opt, sync=fd.AllReduce(bucket_mib=0.001))
data = torch.utils.data.TensorDataset(torch.ones(24, 8), torch.zeros(24, dtype=torch.long))
for epoch in run.epochs(2):
    for x, y in run.loader(data, batch_size=3):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    run.mean(1.0)
    if epoch == 1 and "--stuck" in sys.argv and run.rank == 0:
        time.sleep(600)
run.save()
Path(f"sent-{run.rank}").write_text(str(run.group.meter.bytes_sent))
"""

Span = dict[str, Any]


def checked(path: Path, ranks: int) -> tuple[list[Span], dict[str, Any]]:
    """The spans of a trace in which everything is as the format says, and more strictly."""

    def no_constants(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    trace = json.loads(path.read_bytes(), parse_constant=no_constants)
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    names: dict[tuple[int, int], str] = {}
    titles: dict[int, str] = {}
    order: dict[int, int] = {}
    spans: list[Span] = []
    for event in trace["traceEvents"]:
        pid, tid, name = event["pid"], event["tid"], event["name"]
        assert type(pid) is int
        assert type(tid) is int
        assert 0 <= pid < ranks
        assert type(name) is str
        assert name
        if event["ph"] == "M":
            assert set(event) == {"name", "ph", "pid", "tid", "args"}
            (key, value) = next(iter(event["args"].items()))
            assert key == {"process_labels": "labels"}.get(name, name.split("_", 1)[1])
            if name == "process_name":
                titles[pid] = value
            elif name == "process_sort_index":
                order[pid] = value
            elif name == "thread_name":
                assert (pid, tid) not in names
                names[pid, tid] = value
            continue
        assert event["ph"] == "X"
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert type(event["cat"]) is str
        assert type(event["ts"]) is float
        assert type(event["dur"]) is float
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        for key, value in event["args"].items():
            assert type(key) is str
            assert type(value) in (str, int, float, bool)
            assert value != ""
        if event["cat"] == "comm":
            assert type(event["args"]["bytes"]) is int
            assert event["args"]["bytes"] >= 0
            assert event["args"]["by"]
            assert event["name"] != "all_reduce" or event["args"]["algorithm"]
        event["row"] = names[pid, tid]  # named before it is used
        event["begin"] = round(event["ts"] * 1000)
        event["end"] = event["begin"] + round(event["dur"] * 1000)
        spans.append(event)
    present = {span["pid"] for span in spans}
    assert present == set(titles) == set(order)
    assert all(titles[rank].startswith(f"rank {rank} on host ") for rank in present)
    assert all(order[rank] == rank for rank in present)
    assert min(span["begin"] for span in spans) == 0
    rows = defaultdict(list)
    for span in spans:
        rows[span["pid"], span["tid"]].append(span)
    for row in rows.values():
        nest(row)
    return spans, trace["otherData"]


def nest(row: list[Span]) -> None:
    """Any two spans of a row lie one inside the other, or apart."""
    around: list[Span] = []
    for span in sorted(row, key=lambda span: (span["begin"], -span["end"])):
        while around and around[-1]["end"] <= span["begin"]:
            around.pop()
        assert not around or span["end"] <= around[-1]["end"], (around[-1], span)
        around.append(span)


def of(spans: list[Span], rank: int, name: str) -> list[Span]:
    return [span for span in spans if span["pid"] == rank and span["name"] == name]


def meet(spans: list[Span], ranks: int, slack_ns: int) -> None:
    """No rank leaves an all-reduce before all have entered it: the clocks are one."""
    reductions = [of(spans, rank, "all_reduce") for rank in range(ranks)]
    for calls in reductions:
        calls.sort(key=lambda span: span["begin"])
    assert len({len(calls) for calls in reductions}) == 1
    for same in zip(*reductions, strict=True):
        assert len({span["args"]["bytes"] for span in same}) == 1
        first_out, last_in = min(s["end"] for s in same), max(s["begin"] for s in same)
        assert first_out >= last_in - slack_ns


def test_a_job_that_goes_well(sandbox: Sandbox) -> None:
    script = sandbox.script("train.py", TRAINING)
    done = sandbox.farandole("run", "-n", "2", "--trace", "new/out.json", script)
    assert done.returncode == 0, done.stderr
    target = sandbox.folder / "new" / "out.json"
    spans, facts = checked(target, 2)
    assert [path.name for path in target.parent.iterdir()] == ["out.json"]  # and no parts
    assert done.stderr.endswith(
        f"farandole: the trace of 2 ranks (0, 1) is {target} ({len(spans):,} spans). "
        "Open it at https://ui.perfetto.dev\n"
    )
    assert facts["damaged_lines"] == 0
    assert facts["ranks"] == 2
    for rank in range(2):
        counts = Counter(span["name"] for span in spans if span["pid"] == rank)
        assert counts["forward"] == counts["backward"] == counts["optimizer step"] == 8
        assert counts["data"] == 10  # and the end of each pass
        assert counts["save"] == 1
        # DDP packs the gradients into buckets of the size asked for from the second step on.
        assert counts["bucket 0"] == counts["waiting for gradients"] == 8
        assert counts["bucket 1"] >= 7
        mine = [span for span in spans if span["pid"] == rank]
        assert not any("unfinished" in span["args"] for span in mine)
        assert {span["row"] for span in mine if span["cat"] in ("compute", "data")} == {"main"}
        assert {span["row"] for span in mine if span["cat"] == "comm"} <= {"main", "comm"}
        assert {span["row"].split()[0] for span in mine if span["cat"] == "gradients"} == {
            "gradients"
        }
        # Each bucket is ready inside a backward, and so is the end of the last.
        for wait in of(spans, rank, "waiting for gradients"):
            assert any(
                backward["begin"] <= wait["begin"] and wait["end"] <= backward["end"]
                for backward in of(spans, rank, "backward")
            )
        # The bytes of the spans are those that the meter counted.
        (joined,) = of(spans, rank, "joined")
        sent = 0
        for span in mine:
            if span["cat"] == "comm" and span["begin"] >= joined["end"]:
                count = span["args"]["bytes"]
                sent += {
                    "all_reduce": ring_bytes(count, 2),
                    "all_gather": count,
                    "broadcast": count if rank == 0 else 0,
                }.get(span["name"], 0)
        assert sent == int((sandbox.folder / f"sent-{rank}").read_text()) > 0
    meet(spans, 2, slack_ns=0)


def start_stuck(sandbox: Sandbox, *trace: str, **variables: str) -> tuple[Any, TraceFile]:
    """A job whose rank 1 waits in `save` for rank 0, which sleeps; and what rank 1 has written."""
    script = sandbox.script("train.py", TRAINING)
    job = sandbox.start_farandole("run", "-n", "2", *trace, script, "--stuck", **variables)
    parts = sandbox.folder / "out.json.parts"

    def part(rank: int) -> TraceFile | None:
        path = tracing.part_file(parts, rank)
        return read_part(path) if path.exists() else None

    def waiting() -> bool:  # and both have written what they did before
        first, second = part(0), part(1)
        return (
            first is not None
            and second is not None
            and [span[0] for span in first.spans].count("backward") == 8
            and [span[1] for span in second.open] == ["checkpoint", "comm"]
        )

    sandbox.wait_until(lambda: job.poll() is not None or waiting(), "rank 1 waits for rank 0")
    assert job.poll() is None, job.communicate()
    found = part(1)
    assert found is not None
    return job, found


def test_a_rank_that_is_killed(sandbox: Sandbox) -> None:
    job, part = start_stuck(sandbox, "--trace", "out.json")
    os.kill(part.pid, signal.SIGKILL)
    done = sandbox.finish(job)
    assert done.returncode == 137, done.stderr
    said = "farandole: the trace of 2 ranks (0, 1) is "
    assert done.stderr.index(said) < done.stderr.index("farandole: rank 1 was killed by SIGKILL")
    assert "did not end in order" in done.stderr
    assert not list(sandbox.folder.glob("*.parts"))
    spans, _ = checked(sandbox.folder / "out.json", 2)
    assert len(of(spans, 0, "backward")) == len(of(spans, 1, "backward")) == 8
    (save,) = of(spans, 1, "save")
    (inside,) = (span for span in spans if span["args"].get("unfinished") and span is not save)
    assert save["args"]["unfinished"] is True
    assert (inside["pid"], inside["cat"]) == (1, "comm")
    assert inside["end"] == save["end"]


def test_a_job_that_is_stopped(sandbox: Sandbox) -> None:
    job, _ = start_stuck(sandbox, FARANDOLE_TRACE="out.json")
    os.killpg(job.pid, signal.SIGINT)
    done = sandbox.finish(job)
    assert done.returncode == 130
    spans, _ = checked(sandbox.folder / "out.json", 2)
    assert len(of(spans, 0, "backward")) == 8
    assert "farandole: the trace of 2 ranks" in done.stderr
    assert done.stderr.endswith("farandole: stopped by SIGINT; no worker is left\n")
    assert not list(sandbox.folder.glob("*.parts"))


@pytest.mark.fresh  # the script changes the clock before anything is imported
def test_hosts_whose_clocks_differ(sandbox: Sandbox, two_ranks: list[dict[str, str]]) -> None:
    """Started by hand, so that rank 0 merges; an hour between the clocks."""
    script = sandbox.script("train.py", TRAINING)
    hosts = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "FARANDOLE_TRACE": "out.json"}
    ranks = [rank | hosts for rank in two_ranks]
    ends = sandbox.by_hand(ranks, script, "--hosts")
    assert [end.returncode for end in ends] == [0, 0], ends
    target = sandbox.folder / "out.json"
    assert f"farandole: the trace of 2 ranks (0, 1) is {target}" in ends[0].stderr
    spans, facts = checked(target, 2)
    here, there = facts["clocks"]
    assert here == {"host": "host-0", "ranks": [0], "measured": 0}
    assert (there["host"], there["ranks"], there["measured"]) == ("host-1", [1], 2)
    assert abs(there["offset_us"] + 3.6e9) <= there["error_us"]
    assert abs(there["moved_us"]) <= 2 * there["error_us"]
    meet(spans, 2, slack_ns=round(1000 * there["error_us"]) + 1)
    assert not list(sandbox.folder.glob("*.parts"))


@pytest.mark.mpi
def test_mpirun(sandbox: Sandbox, mpirun: list[str]) -> None:
    script = sandbox.script("train.py", TRAINING)
    done = sandbox.run([*mpirun, "-n", "2", sys.executable, script], FARANDOLE_TRACE="out.json")
    assert done.returncode == 0, done.stderr
    assert "farandole: the trace of 2 ranks (0, 1) is " in done.stderr
    spans, _ = checked(sandbox.folder / "out.json", 2)
    meet(spans, 2, slack_ns=0)
    assert not list(sandbox.folder.glob("*.parts"))


def test_a_script_that_never_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello.py").touch()
    started: list[launcher.Job] = []
    monkeypatch.setattr(launcher, "launch", lambda job: started.append(job) or launcher.Outcome())
    monkeypatch.setattr(sys, "argv", ["farandole", "run", "--trace", "out.json", "hello.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert started[0].environment["FARANDOLE_TRACE_PARTS"] == str(tmp_path / "out.json.parts")
    assert started[0].environment["FARANDOLE_TRACE"] == ""  # the launcher merges
    told = f"farandole: there is no trace {tmp_path / 'out.json'}: no rank got through fd.init()\n"
    assert capsys.readouterr().err == told
    assert [path.name for path in tmp_path.iterdir()] == ["hello.py"]


def test_a_trace_that_cannot_be_written_does_not_hide_how_the_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    failure = Failure(rank=1, exit_code=7, error="ValueError: enough", time_ns=0)

    def launch(job: launcher.Job) -> launcher.Outcome:
        parts = Path(job.environment["FARANDOLE_TRACE_PARTS"])
        header = {"rank": 0, "size": 2, "host": "here", "pid": 1}
        tracing.part_file(parts, 0).write_text(json.dumps(header) + "\n")
        (tmp_path / "out.json").mkdir()  # in the way, by now
        return launcher.Outcome(failure, (1,), logs=tmp_path)

    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["farandole", "run", "--trace", "out.json", "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 7
    said = capsys.readouterr().err
    assert said.index("could not write the trace") < said.index("ValueError: enough")
    assert (tmp_path / "out.json.parts" / "rank-0.jsonl").exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("train.py", "a trace is JSON: write --trace "),
        ("folder.json", "is a folder; name a file in it."),
        ("train.py/out.json", "cannot be written: [Errno 20] Not a directory"),
    ],
)
def test_a_place_that_cannot_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "folder.json").mkdir()
    started: list[launcher.Job] = []
    monkeypatch.setattr(launcher, "launch", started.append)
    monkeypatch.setattr(sys, "argv", ["farandole", "run", "--trace", where, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not started
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "train.py"]


def test_an_earlier_trace_stays_when_the_new_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.json"
    target.write_text("the earlier one")
    parts = tracing.prepare(target)
    header = {"rank": 0, "size": 2, "host": "here", "pid": 1}
    tracing.part_file(parts, 0).write_text(json.dumps(header) + "\n")

    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(tracing.FarandoleError, match=r"No space left.*out\.json\.parts"):
            tracing.merge(target)
    assert target.read_text() == "the earlier one"
    merged = tracing.merge(target)
    assert merged is not None
    assert (merged.ranks, merged.missing, merged.unended) == ((0,), (1,), (0,))
    assert "rank 0 is" in str(merged)
    assert "nothing of rank 1" in str(merged)
    tracing.remove_parts(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert tracing.merge(target) is None


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    parts = tracing.prepare(target)
    lines = [
        {"rank": 0, "size": 1, "host": "here", "pid": 1},
        {"threads": ["main"]},
        [["forward", "compute", 5_000, 7_500, 1, {}]],
        {"end": 8_000, "lost": 3},
    ]
    tracing.part_file(parts, 0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tracing._by_hand([str(target)]) == ""
    assert "3 more were lost" in capsys.readouterr().out
    (span,), _ = checked(target, 1)
    assert (span["ts"], span["dur"], span["row"]) == (0.0, 2.5, "main")
    assert "there is nothing in" in tracing._by_hand([str(tmp_path / "other.json")])
    assert "TRACE.json" in tracing._by_hand([])
