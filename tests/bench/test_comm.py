"""`farandole bench comm`: real ranks at small sizes, the measuring alone, and bad input."""

from __future__ import annotations

import importlib
import io
import json
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.bench.comm import measure as measuring
from farandole.bench.comm import rank as one_rank
from farandole.bench.comm import sides
from farandole.bench.comm.measure import calls_in_a_turn, measure
from farandole.bench.comm.pattern import PERIOD, Pattern
from farandole.bench.comm.plan import DTYPES, BenchPlan
from farandole.bench.comm.plot import speeds
from farandole.bench.comm.rows import Row, Timing
from farandole.bench.comm.sizes import format_size, parse_size, parse_sizes
from farandole.bench.comm.table import Printer, short_seconds
from farandole.cli import commands
from farandole.comm import Group
from farandole.errors import CommError, FarandoleError, LaunchError, UserError
from farandole.launch.backends.mpi import mpirun as mpi_start
from farandole.report.plots.render import png
from farandole.testing import run_world

if TYPE_CHECKING:
    from conftest import Sandbox

MIB = 2**20
PROMISED = {"ranks", "bytes", "algorithm", "transport", "seconds", "against"}
SMALL = ("--sizes", "4KiB,60000B", "--repeats", "2", "--timeout", "30")


# Real processes


def check_rows(
    found: dict[str, Any],
    algorithms: list[str],
    against: list[str],
    sizes: tuple[int, ...] = (4096, 60_000),
) -> None:
    rows = found["rows"]
    assert [(row["bytes"], row["algorithm"]) for row in rows] == [
        (size, name) for size in sizes for name in algorithms
    ]
    for row in rows:
        assert row.keys() >= PROMISED
        assert row["ranks"] == 2
        assert row["hosts"] == 1
        assert row["correct"] is True
        assert row["against_correct"] == dict.fromkeys(against, True)
        assert list(row["against"]) == against
        assert row["quartiles"][0] <= row["seconds"] <= row["quartiles"][1]
        assert row["bus_bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        for name, seconds in row["against"].items():
            assert row["ratio"][name] == pytest.approx(seconds / row["seconds"])
    assert found["environment"]["torch"] == torch.__version__


def test_two_ranks_print_write_and_draw_what_they_measured(
    farandole_cli: Callable[..., subprocess.CompletedProcess[str]],
    readme_command: Callable[[str], list[str]],
    tmp_path: Path,
) -> None:
    """By the command of the README, and more options."""
    more = ["--repeats", "2", "--timeout", "30", "--algorithms", "auto,ring"]
    words = [*readme_command("bench comm"), *more, "--json", "out.json", "--plot", "out.png"]
    done = farandole_cli(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    check_rows(found, ["auto", "ring"], ["gloo"], sizes=parse_sizes("4KiB:1MiB"))
    assert found["command"] == shlex.join(["farandole", *words])
    assert [row["chosen"] for row in found["rows"] if row["algorithm"] == "ring"] == ["ring"] * 5
    assert "auto" not in {row["chosen"] for row in found["rows"]}
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on 1 host, float32, registered memory")
    sizes = [["4", "KiB"], ["16", "KiB"], ["64", "KiB"], ["256", "KiB"], ["1", "MiB"]]
    assert [line.split()[:2] for line in lines[2:12:2]] == sizes
    assert lines[-1] == "every result was right, with the same bits on all ranks."
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]


@pytest.mark.mpi
@pytest.mark.needs("mpirun", "mpi4py")
def test_mpi_in_the_same_processes(sandbox: Sandbox) -> None:
    done = sandbox.farandole(
        "bench", "comm", "-n", "2", *SMALL, "--against", "gloo,mpi", "--json", "out.json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((sandbox.folder / "out.json").read_text())
    check_rows(found, ["auto"], ["gloo", "mpi"])
    assert "Open MPI" in found["environment"]["mpi"]
    assert "--here" not in found["command"]
    assert "\x1b" not in done.stdout, "no colours where nobody sees them"
    assert sum(line.startswith("2 ranks") for line in done.stdout.splitlines()) == 1


@pytest.mark.mpi
@pytest.mark.needs("mpirun", "mpi4py")
def test_a_stop_signal_stops_mpirun_and_its_ranks(sandbox: Sandbox) -> None:
    process = sandbox.start_farandole(
        "bench", "comm", "-n", "2", "--sizes", "4KiB", "--repeats", "1000000",
        "--against", "mpi", "--timeout", "30", "--json", "out.json",
    )  # fmt: skip
    assert process.stdout is not None
    assert "2 ranks" in process.stdout.readline(), "they have met"
    process.send_signal(signal.SIGTERM)
    done = sandbox.finish(process)
    assert done.returncode == 143
    assert "stopped by SIGTERM; no worker is left" in done.stderr
    assert sandbox.processes() == []
    assert not (sandbox.folder / "out.json").exists()


def test_here_under_torchrun(sandbox: Sandbox) -> None:
    done = sandbox.fork(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "farandole", "bench", "comm", "--here", *SMALL, "--against", "",
        "--memory", "plain", "--dtype", "bfloat16", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((sandbox.folder / "out.json").read_text())
    check_rows(found, ["auto"], [])
    assert found["settings"] == {
        "dtype": "bfloat16",
        "memory": "plain",
        "device": "cpu",
        "repeats": 2,
    }
    assert found["command"].startswith("farandole bench comm --here")


def test_what_never_returns_is_ended(sandbox: Sandbox) -> None:
    script = sandbox.script(
        "wedged.py",
        f"""
import threading
from pathlib import Path
from farandole.bench.comm.measure import measure
from farandole.bench.comm.plan import BenchPlan
from farandole.testing import run_world

class Wedged:
    name = "wedged"
    def bind(self, tensor):
        return threading.Event().wait

plan = BenchPlan(sizes=({8 * MIB},), against=(), timeout_seconds=0.2)
run_world(2, lambda run: list(measure(run.group, plan, [Wedged()])), folder=Path())
""",
    )
    done = sandbox.fork(script)
    assert done.returncode == 1
    assert "an all-reduce of 8 MiB by wedged did not end on rank" in done.stderr
    assert "of 2 within 0.4 s" in done.stderr


# The measuring, with ranks as threads


class Rival:
    """Sums through the group, like anyone would, and then does something to the result."""

    def __init__(self, name: str, group: Group, spoil: Callable[[torch.Tensor], None]) -> None:
        self.name = name
        self.turns = 0
        self._group = group
        self._spoil = spoil

    def bind(self, tensor: torch.Tensor) -> Callable[[], object]:
        def call() -> None:
            self.turns += 1
            self._group.all_reduce(tensor)
            self._spoil(tensor)

        return call


def rows_of(
    tmp_path: Path, plan: BenchPlan, ranks: int, spoil: Callable[[int, torch.Tensor], None]
) -> list[list[Row]]:
    def body(run: Any) -> list[Row]:
        rival = Rival("rival", run.group, lambda tensor: spoil(run.rank, tensor))
        return [row for rows in measure(run.group, plan, [rival]) for row in rows]

    return run_world(ranks, body, folder=tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_right(tmp_path: Path, dtype: str) -> None:
    plan = BenchPlan(sizes=(8, 4096, 500_000), algorithms=("auto", "ring"), dtype=dtype, repeats=1)
    everyone = rows_of(tmp_path, plan, 3, lambda rank, tensor: None)
    assert everyone[0] == everyone[1] == everyone[2], "all ranks know all of it"
    assert len(everyone[0]) == 6
    for row in everyone[0]:
        assert row.correct
        assert row.against_correct == {"rival": True}
        assert row.transport == "in-process"
        assert row.chosen == ("native" if row.algorithm == "auto" else "ring")
        assert row.bus_bytes_per_second == pytest.approx(4 / 3 * row.bytes / row.time.median)


def last_plus_one(rank: int, tensor: torch.Tensor) -> None:
    tensor[-1] += rank == 1


def scaled(rank: int, tensor: torch.Tensor) -> None:
    tensor *= 2


def rounded_otherwise(rank: int, tensor: torch.Tensor) -> None:
    """Within the margin on every rank, but not the same bits; whole numbers stay exact."""
    if rank == 1 and (tensor != tensor.round()).any():
        tensor *= 1 + torch.finfo(tensor.dtype).eps


@pytest.mark.parametrize("spoil", [last_plus_one, scaled, rounded_otherwise])
def test_wrong_results_are_told(tmp_path: Path, spoil: Callable[[int, torch.Tensor], None]) -> None:
    plan = BenchPlan(sizes=(40_000,), repeats=2)
    ((row,), _) = rows_of(tmp_path, plan, 2, spoil)
    assert row.correct
    assert row.against_correct == {"rival": False}


def test_a_result_that_is_wrong_once_in_many_turns(tmp_path: Path) -> None:
    seen = {"calls": 0}

    def once(rank: int, tensor: torch.Tensor) -> None:
        seen["calls"] += rank
        if rank and seen["calls"] == 30:
            tensor[0] += 1

    ((row,), _) = rows_of(tmp_path, BenchPlan(sizes=(4096,), repeats=3), 2, once)
    assert seen["calls"] > 30
    assert row.against_correct == {"rival": False}


def test_wrong_results_of_ours_are_written_down_and_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = sides.Ours.bind

    def bind(side: sides.Ours, tensor: torch.Tensor) -> Callable[[], object]:
        call = original(side, tensor)
        return lambda: call() if side.name == "ring" else tensor.zero_()

    monkeypatch.setattr(sides.Ours, "bind", bind)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    here = threading.local()
    monkeypatch.setattr(one_rank, "init", lambda timeout: here.run)
    plan = BenchPlan(sizes=(4096,), algorithms=("auto", "ring"), against=(), repeats=1)

    def body(run: Any) -> None:
        here.run = run
        one_rank.take_part(plan, "as typed", tmp_path / "out.json", None)

    with pytest.raises(FarandoleError, match="wrong results: auto at 4 KiB"):
        run_world(2, body, folder=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["correct"] for row in found["rows"]] == [False, True]
    assert found["command"] == "as typed"
    said = capsys.readouterr().out.splitlines()
    assert "WRONG" in said[2]
    assert said[-1] == "1 of 2 rows had WRONG results."


def test_sides_take_turns_and_each_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    original = measuring._Lane.take_turn

    def noted(lane: Any) -> None:
        if lane._group.rank == 0:
            order.append(lane._what.rpartition(" ")[2])
        original(lane)

    monkeypatch.setattr(measuring._Lane, "take_turn", noted)
    plan = BenchPlan(sizes=(4096,), algorithms=("auto", "ring"), repeats=3)
    rows_of(tmp_path, plan, 2, lambda rank, tensor: None)
    assert order == [
        *("auto", "ring", "rival"),
        *("ring", "rival", "auto"),
        *("rival", "auto", "ring"),
    ]


@given(size=st.integers(1, 2**31))
def test_turns_are_short_in_bytes_and_never_empty(size: int) -> None:
    calls = calls_in_a_turn(size)
    assert 1 <= calls <= 20
    assert calls == 1 or calls * size <= 8 * MIB


def test_the_slowest_rank_counts() -> None:
    # By repeat, the slowest of the two ranks: 5, 2, 9, 4, 7.
    timing = Timing.of([[5.0, 1.0, 9.0, 4.0, 3.0], [1.0, 2.0, 3.0, 1.0, 7.0]])
    assert (timing.quartile_1, timing.median, timing.quartile_3) == (4.0, 5.0, 7.0)
    assert timing.spread == pytest.approx(3 / 5)
    assert Timing.of([[2.0], [1.0]]) == Timing(2.0, 2.0, 2.0)


# Numbers whose sum is known


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(2, 12),
    length=st.integers(1, 3 * PERIOD),
    dtype=st.sampled_from(DTYPES),
    thirds=st.booleans(),
    data=st.data(),
)
def test_the_sum_is_known_in_any_dtype_and_one_wrong_number_is_noticed(
    ranks: int, length: int, dtype: str, thirds: bool, data: st.DataObject
) -> None:
    kind = getattr(torch, dtype)
    total = torch.zeros(length, dtype=kind)
    part = torch.empty(length, dtype=kind)
    order = list(range(ranks))
    data.draw(st.randoms(use_true_random=False)).shuffle(order)
    for rank in order:
        Pattern(rank, ranks, kind, thirds=thirds).fill(part)
        total += part
    pattern = Pattern(0, ranks, kind, thirds=thirds)
    assert pattern.is_sum(total)
    place = data.draw(st.integers(0, length - 1))
    total[place] = 2 * total[place].to(torch.float64) + 1 if kind.is_floating_point else -3
    assert not pattern.is_sum(total)


@pytest.mark.parametrize("ranks", [2, 4, 64, 130])
def test_a_block_in_the_wrong_place_is_noticed(ranks: int) -> None:
    total, part = torch.zeros(65_536, dtype=torch.int8), torch.empty(65_536, dtype=torch.int8)
    for rank in range(ranks):
        Pattern(rank, ranks, torch.int8).fill(part)
        total += part
    assert total.min() >= 0, "nothing overflowed"
    pattern = Pattern(0, ranks, torch.int8)
    assert pattern.is_sum(total)
    for block in (1024, 4096, 16_384):
        assert not pattern.is_sum(total.roll(block))


# Sizes


@given(st.integers(1, 2**50))
def test_a_size_survives_its_text_form(count: int) -> None:
    assert parse_size(format_size(count)) == count
    assert parse_size(str(count)) == count


@given(st.integers(1, 2**24), st.integers(1, 2**30))
def test_a_range_includes_both_ends_in_steps_of_four(one: int, other: int) -> None:
    low, high = sorted((one, other))
    found = parse_sizes(f"{low}:{high}")
    assert (found[0], found[-1]) == (low, high)
    assert all(b == 4 * a for a, b in pairwise(found[:-1]))
    assert all(a < b <= 4 * a for a, b in pairwise(found))


def test_sizes_as_people_write_them() -> None:
    assert parse_sizes("4KiB:64MiB") == tuple(4096 * 4**i for i in range(8))
    assert parse_sizes("1MiB, 4KiB,1MiB") == (4096, MIB)
    assert parse_sizes("1.5 KiB") == (1536,)
    assert parse_sizes("2MB") == (2_000_000,)
    assert [format_size(n) for n in (1000, 4096, 3 * MIB, 2**30)] == [
        "1000 B", "4 KiB", "3 MiB", "1 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "KiB", "4kib", "4 Kibit", "-4KiB", "0", "0.3B", "1e3", "4KiB:"]
)
def test_no_size(text: str) -> None:
    with pytest.raises(UserError, match="such as 64KiB"):
        parse_sizes(text)


# Table and plot


def row(size: int, algorithm: str = "auto", correct: bool = True, **against: float) -> Row:
    rivals = {name: Timing(value, value, value) for name, value in against.items()}
    right = dict.fromkeys(against, True)
    time = Timing(62.1e-6, 60e-6, 66e-6)
    return Row(4, size, algorithm, "native", "shm", time, correct, rivals, right)


def test_the_table_is_80_wide_and_in_columns() -> None:
    plan = BenchPlan(sizes=(4096, 64 * MIB), against=("gloo", "mpi"))
    text = io.StringIO()
    printer = Printer(plan, text)
    printer.heading()
    printer.rows([row(4096, gloo=2e-3, mpi=7e-7), row(64 * MIB, correct=False, gloo=1.0, mpi=1.0)])
    heading, first, second = text.getvalue().splitlines()
    assert max(map(len, (heading, first, second))) <= 80
    assert first.split() == [
        *("4", "KiB", "auto:", "native", "shm", "62.1", "µs", "10", "%", "98.9", "MB/s"),
        *("32.21×", "0.01×"),
    ]
    assert "WRONG" in second
    assert heading.index("algorithm") == first.index("auto") == second.index("auto")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7e-7, "0.70 µs"),
        (62.14e-6, "62.1 µs"),
        (999.6e-6, "1.00 ms"),
        (0.8449, "845 ms"),
        (2, "2.00 s"),
    ],
)
def test_short_seconds(value: float, text: str) -> None:
    assert short_seconds(value) == text


def test_the_plot_shows_times_and_ratios() -> None:
    sizes = [4096 * 4**step for step in range(8)]
    rows = [row(s, name, gloo=2e-3, mpi=1e-5) for s in sizes for name in ("auto", "ring")]
    figure = speeds(rows, "4 ranks")
    times, ratios = figure.axes
    assert len(times.get_lines()) == 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "farandole auto", "farandole ring", "gloo", "mpi",
    ]  # fmt: skip
    curves = [line for line in ratios.get_lines() if not str(line.get_label()).startswith("_")]
    assert [line.get_label() for line in curves] == [
        "gloo / auto", "mpi / auto", "gloo / ring", "mpi / ring",
    ]  # fmt: skip
    assert curves[0].get_ydata()[0] == pytest.approx(2e-3 / 62.1e-6)
    assert png(lambda: speeds(rows[:1], "one size")).startswith(b"\x89PNG")
    alone = speeds([row(4096)], "no alternatives")
    assert len(alone.axes) == 1


# Bad input is refused before anything starts


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> BaseException | None:
    def no_start(*started: object) -> None:
        pytest.fail(f"ranks were started: {started}")

    monkeypatch.setattr("farandole.launch.launcher.launch", no_start)
    monkeypatch.setattr(mpi_start, "run", no_start)
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    return CliRunner().invoke(commands, ["bench", "comm", *arguments]).exception


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "1"], "-n 1: an all-reduce needs at least 2"),
        ([], "Give -n, such as -n 4"),
        (["-n", "2", "--here"], "leave -n 2"),
        (["--here"], "this process is alone"),
        (["-n", "2", "--device", "cuda", "--against", "gloo"], "--device cuda --against: there is"),
        (["-n", "2", "--against", "nccl"], "--device cpu --against: there is no 'nccl'"),
        (["-n", "2", "--sizes", "4KiB:1QiB"], "'1QiB' is not a size"),
        (["-n", "2", "--sizes", "1MiB:4KiB"], "Write 4KiB:1MiB"),
        (["-n", "2", "--sizes", "4KiB,10B"], "10 B is no whole number of float32, 4 bytes"),
        (["-n", "2", "--algorithms", "auto,rign"], "Did you mean 'ring'?"),
        (["-n", "2", "--algorithms", ""], "--algorithms: give at least one"),
        (["-n", "2", "--algorithms", "ring,ring"], "ring is given twice"),
        (["-n", "2", "--against", "gloo,nccl"], "there is no 'nccl'. Known: gloo, mpi."),
        (["-n", "2", "--against", "glo"], "Did you mean 'gloo'?"),
        (["-n", "2", "--dtype", "float31"], "Did you mean 'float32'?"),
        (["-n", "2", "--dtype", "float16", "--against", "mpi"], "MPI has no float16"),
        (["-n", "2", "--memory", "shared"], "Known: plain, registered."),
        (["-n", "2", "--repeats", "0"], "--repeats 0: give 1 or more"),
        (["-n", "2", "--timeout", "0"], "--timeout 0"),
        (["-n", "2", "--timeout", "nan"], "--timeout nan"),
        (["-n", "2", "--json", "/no-such-folder/o.json"], "--json /no-such-folder/o.json cannot"),
        (["-n", "2", "--plot", "/no-such-folder/o.png"], "--plot /no-such-folder/o.png cannot"),
        (["-n", "2", "--plot", "out.svg"], "ending in .png"),
    ],
)
def test_bad_input(monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str) -> None:
    error = invoke(monkeypatch, *arguments)
    assert isinstance(error, UserError), error
    assert complaint in str(error)


def test_no_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = invoke(monkeypatch, "-n", "2", "--against", "mpi")
    assert isinstance(error, UserError)
    assert "pip install mpi4py" in str(error)


@pytest.fixture
def path_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str | None], None]]:
    """A PATH with nothing on it but, if wanted, an mpirun that says what it is."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def put(version: str | None) -> None:
        if version is not None:
            fake = tmp_path / "mpirun"
            fake.write_text(f"#!{shutil.which('sh')}\necho '{version}'\n")
            fake.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return put


def test_no_mpirun(
    monkeypatch: pytest.MonkeyPatch, path_with: Callable[[str | None], None]
) -> None:
    path_with(None)
    error = invoke(monkeypatch, "-n", "2", "--against", "gloo,mpi")
    assert isinstance(error, UserError)
    assert "apt install openmpi-bin" in str(error)


def test_another_mpirun(
    monkeypatch: pytest.MonkeyPatch, path_with: Callable[[str | None], None]
) -> None:
    path_with("HYDRA build details:")
    error = invoke(monkeypatch, "-n", "2", "--against", "mpi")
    assert isinstance(error, UserError)
    assert "(HYDRA build details:)" in str(error)
    assert "mpirun -n 4 farandole bench comm --here" in str(error)


def test_mpirun_that_fails(
    monkeypatch: pytest.MonkeyPatch, path_with: Callable[[str | None], None]
) -> None:
    path_with("mpirun (Open MPI) 4.1.4")
    with monkeypatch.context() as patch:
        patch.setattr(mpi_start, "run", lambda words, environment: mpi_start.End(3))
        arguments = ["bench", "comm", "-n", "2", "--against", "mpi"]
        error = CliRunner().invoke(commands, arguments).exception
    assert isinstance(error, LaunchError)
    assert "mpirun ended with exit code 3" in str(error)


class FakeWorld:
    def Get_rank(self) -> int:  # noqa: N802  (mpi4py's spelling)
        return 0

    def Get_size(self) -> int:  # noqa: N802
        return 1


def test_ranks_that_mpirun_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeMpi:
        COMM_WORLD = FakeWorld()
        IN_PLACE = object()

        @staticmethod
        def Get_library_version() -> str:  # noqa: N802
            return "Some MPI v9\0"

    monkeypatch.setattr(sides.importlib, "import_module", lambda name: FakeMpi)
    with pytest.raises(UserError, match=r"for MPI rank 0 of 1\. .*: Some MPI v9$"):
        run_world(2, lambda run: sides.Mpi(run.group), folder=tmp_path)


def test_mpi4py_without_an_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(sides.importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"cannot load MPI library.*apt install openmpi-bin"):
        run_world(2, lambda run: sides.Mpi(run.group), folder=tmp_path)


def test_gloo_without_a_process_group() -> None:
    with pytest.raises(CommError, match="no process group"):
        sides.Gloo()


def test_on_gpus_no_memory_is_registered() -> None:
    assert BenchPlan(sizes=(4096,)).memory_used == "registered"
    assert BenchPlan(sizes=(4096,), memory="plain").memory_used == "plain"
    assert BenchPlan(sizes=(4096,), device="cuda", against=("nccl",)).memory_used == "gpu"


def test_a_plan_survives_its_arguments() -> None:
    plan = BenchPlan(
        sizes=(4096, 60_000), algorithms=("auto", "ring"), against=(), dtype="int8",
        memory="plain", repeats=3, timeout_seconds=0.1,
    )  # fmt: skip
    words = plan.arguments()
    given_back = dict(zip(words[::2], words[1::2], strict=True))
    assert parse_sizes(given_back["--sizes"]) == plan.sizes
    assert given_back["--against"] == ""
    assert float(given_back["--timeout"]) == 0.1
