"""`farandole bench train -n 1,2,4 --plot`: real workers once, and the arithmetic by itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from farandole.bench.scaling.plan import BOTH, Cell, Curve, plan_cells, read_counts
from farandole.bench.scaling.show import picture, table
from farandole.bench.scaling.study import Row, ScalingStudy, as_json, run_study
from farandole.bench.throughput import Workload
from farandole.cli import commands
from farandole.errors import UserError
from farandole.launch.job import Job, Outcome
from farandole.options import parse_options
from farandole.report.plots import render
from farandole.worker.failure import Failure

Cli = Callable[..., subprocess.CompletedProcess[str]]
SMALL = Workload(model="mlp", image_size=4, batch_size=8)


def test_a_study_with_real_workers(farandole_cli: Cli, tmp_path: Path) -> None:
    done = farandole_cli(
        "bench", "train", "-n", "2,1", "--model", "mlp", "--image-size", "4", "--batch-size", "4",
        "--scaling", "both", "--warmup-batches", "1", "--batches-per-iteration", "1",
        "--iterations", "2", "--epoch-images", "1000", "--plot", "out.svg", "--json", "out.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["scaling"], row["workers"], row["batch_size"]) for row in rows] == [
        ("weak", 1, 4), ("weak", 2, 4), ("strong", 1, 4), ("strong", 2, 2),
    ]  # fmt: skip
    for row in rows:
        assert row["epoch_seconds"] == pytest.approx(1000 / row["images_per_second"])
    assert rows[0]["images_per_second"] == rows[2]["images_per_second"], "measured once"
    assert rows[1]["efficiency"] == pytest.approx(
        rows[1]["images_per_second"] / rows[0]["images_per_second"] / 2
    )
    assert "efficiency" in done.stdout
    assert "Iter #" not in done.stdout
    svg = (tmp_path / "out.svg").read_text()
    for text in ("ideal", "mlp, weak", "mlp, strong", "workers"):
        assert text in svg
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.svg"]


def pretend(rates: dict[int, float | str]) -> tuple[Callable[[Job], Outcome], list[int]]:
    """Jobs that take no time: images per second of all workers, or why it fails."""
    ran: list[int] = []

    def launch(job: Job) -> Outcome:
        ran.append(job.workers)
        rate = rates[job.workers]
        if rate == "SIGINT":
            return Outcome(stopped_by="SIGINT")
        if isinstance(rate, str):
            return Outcome(Failure(1, 1, f"ValueError: {rate}\n", 5), (1,))
        workload = parse_options(Workload, job.command[2], what="test")
        each = rate / job.workers
        found: dict[str, Any] = {
            "settings": {"batches_per_iteration": 10},
            "images_per_second_total": {"mean": rate, "ci": 1.0},
            "images_per_second_per_worker": {"iterations": [each, each]},
            "waited_seconds": 0.1 * 2 * 10 * workload.batch_size / each,
        }
        Path(job.command[3]).write_text(json.dumps(found))
        return Outcome()

    return launch, ran


def study(
    rates: dict[int, float | str], scalings: Any = ("weak",)
) -> tuple[ScalingStudy, list[int]]:
    launch, ran = pretend(rates)
    cells = plan_cells(["mlp"], ["allreduce"], scalings, sorted(rates), 8)
    return run_study(cells, SMALL, 600, launch, lambda row: None), ran


def test_efficiency_is_against_the_smallest_number_of_workers() -> None:
    found, _ = study({2: 100.0, 4: 150.0, 8: 400.0})
    assert [row.efficiency for row in found.rows] == [1.0, 0.75, 1.0]
    assert [row.epoch_seconds for row in found.rows] == [6.0, 4.0, 1.5]
    assert [row.waited_share for row in found.rows] == pytest.approx([0.1] * 3)


def test_one_that_fails_leaves_the_others_and_has_its_reason() -> None:
    found, ran = study({1: 100.0, 2: "no luck", 4: 200.0}, BOTH)
    assert ran == [1, 2, 4, 2, 4], "what both have in common runs once"
    assert [row.efficiency for row in found.rows[:3]] == [1.0, None, 0.5]
    assert "no luck" in found.rows[1].problem
    assert json.loads(as_json(found, {}))["rows"][1]["images_per_second"] is None


def test_what_was_measured_before_the_end_stays() -> None:
    found, _ = study({1: 100.0, 2: "SIGINT", 4: 1.0})
    assert found.stopped_by == "SIGINT"
    assert [row.cell.workers for row in found.rows] == [1]


def test_more_workers_than_cores_are_said() -> None:
    curve = Curve("mlp", "allreduce", "weak")
    rows = [Row(Cell(curve, n, 8), 100.0 * n, 1.0, 6.0, 1.0, 0.0) for n in (1, 4)]
    drawn = table(rows, 600, ("core", 2))
    assert list(drawn.columns[1].cells) != []
    assert [str(cell) for cell in drawn.columns[1].cells] == ["1", "4*"]
    assert "more workers than cores (2)" in str(drawn.caption)
    svg = render.picture(Path("x.svg"), lambda: picture(rows, 600, "t", ("core", 2)), "x").decode()
    assert svg.count("more workers than cores") == 3
    assert "more workers" not in str(table(rows[:1], 600, ("core", 2)).caption)


@pytest.mark.parametrize("rates", [(230.0, 410.0), (100.0, 101.0), (90.0, 40_000.0), (5.0, 5.0)])
def test_all_axes_have_numbers(rates: tuple[float, float]) -> None:
    """Also where the values have no power of ten between them."""
    curve = Curve("mlp", "allreduce", "weak")
    cells = [Cell(curve, n, 8) for n in (1, 2)]
    rows = [Row(c, r, 1.0, 600 / r, 1.0, 0.0) for c, r in zip(cells, rates, strict=True)]
    for axes in picture(rows, 600, "t", ("core", 2)).axes:
        low, high = axes.get_ylim()
        assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 3


def test_labels_say_what_differs() -> None:
    one, two = Curve("mlp", "daso", "weak"), Curve("mlp", "local", "weak")
    assert one.label([one]) == "mlp"
    assert one.label([one, two]) == "mlp, daso"


def test_counts() -> None:
    assert read_counts("4,1,2") == (1, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("-n 1,x", "-n 1,x: give a number of workers, or several"),
        ("-n 1,0", "at least 1 worker"),
        ("-n 2,2", "2 is given twice"),
        ("-n 1,3 --scaling strong --model mlp --batch-size 32", "32 images cannot be divided"),
        ("-n 1,2 --model mlp --plot out.pdf", "drawn as .png or .svg"),
        ("-n 1,2 --model mlp --plot /no-such-folder/out.png", "/no-such-folder: No such file"),
        ("-n 1,2 --model mlp --bare", "leave it out of a study"),
        ("-n 1,2 --model mlp --epoch-images 0", "--epoch-images 0: give 1 or more"),
        ("-n 1,2 --model mlp --model resnet5", "Did you mean 'resnet50'?"),
        ("-n 1,2 --model mlp --sync alreduce", "Did you mean 'allreduce'?"),
    ],
)
def test_bad_input(monkeypatch: pytest.MonkeyPatch, arguments: str, complaint: str) -> None:
    def no_launch(job: object) -> None:
        pytest.fail(f"workers were started: {job}")

    monkeypatch.setattr("farandole.bench.scaling.command.launch", no_launch)
    error = CliRunner().invoke(commands, ["bench", "train", *arguments.split()]).exception
    assert isinstance(error, UserError)
    assert complaint in str(error)
