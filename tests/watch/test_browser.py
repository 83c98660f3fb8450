"""The page in a real Chromium: as a file, on a phone, and live. One browser serves all tests."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farandole.report.history import History, Note, Point
from farandole.report.lane import Lane
from farandole.report.page import write_report
from farandole.report.target import Target
from tests.support.browser import Browser, running_browser

pytestmark = pytest.mark.needs("chromium", "tornado")
PATIENCE_SECONDS = 200.0
TARGET = ("--target", "accuracy=0.9")
HEADLINE = "document.querySelector('h1').textContent"
HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\"></script>"
    "<script>document.title='broken'</script>"
)
PATHS = "[...document.querySelectorAll('#chart-0-1 path.lane')].map(path => path.dataset.lane)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


def lane(sync: str, speed: float, **more: Any) -> Lane:
    points = tuple(
        Point(
            at * speed, 100 * at, 10 * at, 0.1 * at, 5000 * at,
            {"accuracy": 1 - 0.5**at, "loss": 2.0 / at},
        )
        for at in range(1, 8)
    )  # fmt: skip
    notes = (Note(0.0, values={"period": 8.0}), Note(3.0, values={"period": 2.0}))
    start = {"sync": sync, "size": 2, "script": "train.py", "seed": 0}
    history = History(start, points, points[-1], True, (), notes)
    return replace(Lane(sync, 2, "ok", history, price=2.5), **more)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lanes = [
        lane("allreduce", 2.0),
        lane("local:every=8", 1.0),
        lane(HOSTILE, 1.5, outcome="failed", problem=f"rank 1: {HOSTILE}"),
    ]
    folder = tmp_path_factory.mktemp("report")
    return write_report(folder, lanes, Target.parse("accuracy=0.9"), {"machine": HOSTILE})


def test_curves_that_zoom_hide_and_change_their_axis(browser: Browser, report: Path) -> None:
    browser.resize(1100, 900)
    browser.open(report.as_uri())
    browser.wait(f"{PATHS}.length === 3")
    assert browser.evaluate(PATHS) == ["allreduce", "local:every=8", HOSTILE], "as text"
    assert browser.evaluate("document.querySelectorAll('#chart-0-1 .star').length") == 3
    assert browser.evaluate("document.querySelectorAll('#chart-0-1 .cross').length") == 1

    browser.click('.entry[data-lane="allreduce"]')
    browser.wait(f"{PATHS}.length === 2")
    assert "allreduce" not in browser.evaluate(PATHS)
    browser.click('.entry[data-lane="allreduce"]')
    browser.wait(f"{PATHS}.length === 3")

    ticks = "[...document.querySelectorAll('#chart-0-1 .tick.middle')].map(t => t.textContent)"
    assert browser.evaluate(ticks)[0] == "0 s"
    x, y = browser.place("#chart-0-1 svg", 0.4, 0.5)
    browser.mouse("mousePressed", x, y, 1)
    browser.mouse("mouseMoved", x + 100, y + 2, 1)
    browser.mouse("mouseMoved", x + 300, y + 2, 1)
    browser.mouse("mouseReleased", x + 300, y + 2)
    browser.wait("!document.querySelector('#chart-0-1 .reset').hidden")
    assert "0 s" not in browser.evaluate(ticks)
    browser.click("#chart-0-1 .reset")
    assert "0 s" in browser.evaluate(ticks)

    browser.mouse("mouseMoved", *browser.place('#chart-0-1 .star[style*="lane-1"]'))
    tip = browser.evaluate("document.querySelector('#chart-0-1 .tip').textContent")
    assert tip == "local:every=8accuracy: 0.9375time: 4 s"

    choose = "(() => { const s = document.querySelector('select.axis'); s.value = 'bytes'; "
    browser.evaluate(choose + "s.dispatchEvent(new Event('change')); })()")
    assert browser.evaluate(ticks)[:3] == ["0 B", "5 kB", "10 kB"]
    browser.click("input.log")
    browser.wait(f"{PATHS}.length === 3")
    assert browser.evaluate("document.title") != "broken"
    assert browser.errors == []


def test_a_phone_and_the_dark(browser: Browser, report: Path) -> None:
    browser.resize(390, 844, mobile=True)
    browser.open(report.as_uri())
    browser.wait(f"{PATHS}.length === 3")
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    ground = "getComputedStyle(document.body).backgroundColor"
    stroke = "getComputedStyle(document.querySelector('#chart-0-1 path.lane')).stroke"
    colours = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        colours.append((browser.evaluate(ground), browser.evaluate(stroke)))
    assert colours[0][0] == "rgb(255, 255, 255)"
    assert len(set(colours[0] + colours[1])) == 4
    browser.prefer("light")
    assert browser.errors == []


@pytest.fixture
def start_watch(sandbox: Any) -> Iterator[Callable[..., str]]:
    """Starts `farandole watch`, and returns its address."""
    started = []

    def start(*words: str) -> str:
        process = sandbox.start_farandole("watch", *words)
        started.append(process)
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        return found[0]

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors) == (0, ""), "a browser that leaves is no error"


def test_a_live_page_gets_what_is_logged(
    browser: Browser, start_watch: Callable[..., str], tmp_path: Path
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    counters = {"samples": 100, "steps": 10, "waited_seconds": 0.1, "bytes_sent": 1000}
    metrics.write_text('{"event": "start", "sync": "daso", "size": 2, "script": "train.py"}\n')

    def log(time: float, **values: float) -> None:
        record = {"event": "log", "time": time, **counters, "metrics": values}
        with metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    log(1.0, accuracy=0.5)
    browser.resize(1100, 900)
    browser.open(start_watch("run", *TARGET))
    browser.wait("document.querySelector('#live .state').textContent === 'live'")
    browser.wait(f"{PATHS}.length === 1")
    browser.click('.entry[data-lane="daso"]')
    browser.wait(f"{PATHS}.length === 0")
    log(2.0, accuracy=0.95, loss=0.1)
    browser.wait(f"{HEADLINE}.includes('reached accuracy')")
    browser.wait("document.querySelectorAll('.panel').length === 4")
    assert browser.evaluate(PATHS) == [], "what was hidden stays hidden"
    browser.click('.entry[data-lane="daso"]')
    browser.wait(f"{PATHS}.length === 1")
    browser.wait("document.querySelectorAll('#chart-0-1 .star').length === 1")
    assert browser.errors == []
    browser.call("Page.navigate", url="about:blank")


RACED = """
import time, farandole as fd
from pathlib import Path
run = fd.init()
if str(run.settings.sync) == "local:every=2":
    raise RuntimeError("no luck today")
run.log(accuracy=0.5)
while not Path("go").exists():
    time.sleep(0.05)
run.log(accuracy=0.95)
"""


def test_a_race_while_it_runs(
    browser: Browser, start_watch: Callable[..., str], sandbox: Any
) -> None:
    sandbox.script("raced.py", RACED)
    syncs = ("--sync", "local:every=2", "--sync", "allreduce")
    race = sandbox.start_farandole("race", "-n", "1", *syncs, "--runs", "races", "raced.py")
    sandbox.wait_until(lambda: any(sandbox.folder.glob("races/*/race.json")), "its first lane")
    (folder,) = sandbox.folder.glob("races/race-raced-*")
    browser.resize(1100, 900)
    address = start_watch(str(folder.relative_to(sandbox.folder)), *TARGET)
    browser.open(address)
    browser.wait("document.querySelector('#section-warnings').textContent.includes('no luck')")
    browser.wait(f"{PATHS}.length === 1 && {PATHS}[0] === 'allreduce'")
    cells = "[...document.querySelectorAll('table.race td.words')].map(td => td.textContent)"
    assert browser.evaluate(cells) == ["allreduce", "running", "local:every=2", "failed"]
    browser.call("Page.navigate", url="about:blank")  # it leaves while the race goes on
    (sandbox.folder / "go").touch()
    done = sandbox.finish(race)
    assert done.returncode == 1, done.stderr
    browser.open(address)
    browser.wait(f"{HEADLINE}.includes('reached accuracy')")
    assert "ok" in browser.evaluate(cells)
    assert browser.errors == []
    browser.call("Page.navigate", url="about:blank")


TUNED = """
import time, farandole as fd
from pathlib import Path
run = fd.init()
kind = run.choose("kind", ["good", "bad", "<b>odd</b>"])
run.log(loss=0.5, accuracy=0.8)
if kind == "bad":
    raise RuntimeError("out of luck")
while not Path("go").exists():
    time.sleep(0.05)
run.log(loss=0.4, accuracy=0.9 if kind == "good" else 0.7)
"""


@pytest.mark.needs("optuna")
def test_a_study_while_it_runs(
    browser: Browser, start_watch: Callable[..., str], sandbox: Any
) -> None:
    sandbox.script("tuned.py", TUNED)
    words = ("--trials", "3", "--metric", "accuracy", "--sampler", "grid", "--parallel", "3")
    tune = sandbox.start_farandole("tune", *words, "--storage", "found/study.journal", "tuned.py")
    metrics = [sandbox.folder / f"found/trial-{number}/metrics.jsonl" for number in range(3)]
    sandbox.wait_until(lambda: all(path.exists() for path in metrics), "all trials")
    browser.resize(390, 844, mobile=True)
    browser.open(start_watch("found"))
    browser.wait("document.querySelector('#section-warnings').textContent.includes('out of luck')")
    assert "No trial has come to its end" in browser.evaluate(HEADLINE)
    browser.wait(f"{PATHS}.length === 3")
    first = browser.evaluate("document.querySelector('.panel summary').textContent")
    assert first == "accuracy", "what is tuned comes first, not what is logged first"
    (sandbox.folder / "go").touch()
    done = sandbox.finish(tune)
    assert done.returncode == 0, done.stderr
    browser.wait(f"{HEADLINE}.includes('best accuracy: 0.9')")
    assert "kind good" in browser.evaluate(HEADLINE)
    rows = "[...document.querySelectorAll('#section-table tbody tr')].map(row => row.textContent)"
    first, second, last = browser.evaluate(rows)
    assert "good" in first
    assert "<b>odd</b>" in second, "as text"
    assert "failed: RuntimeError: out of luck" in last
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.errors == []
    browser.call("Page.navigate", url="about:blank")
