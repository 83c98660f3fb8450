"""`farandole watch` as a process: who gets in, what is sent, and how it ends."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from farandole.errors import UserError
from farandole.race.record import RaceRecord, RunRecord, locked
from farandole.race.runner import Entry
from farandole.report.metrics import FILE_NAME
from farandole.watch.opening import announce
from farandole.watch.source import WatchedFolder
from farandole.watch.state import state_of

pytestmark = pytest.mark.needs("tornado")
PATIENCE_SECONDS = 200.0


def line(event: str, time: float, **values: float) -> str:
    counters = {"samples": 100, "steps": 10, "waited_seconds": 0.1, "bytes_sent": 1000}
    said = {"event": event, "time": time, **counters}
    return json.dumps(said | ({"metrics": values} if event == "log" else {})) + "\n"


def begin_run(folder: Path, sync: str = "daso") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    start = json.dumps({"event": "start", "sync": sync, "size": 2, "script": "train.py"})
    path.write_text(start + "\n" + line("log", 1.0, accuracy=0.5))
    return path


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


class Served:
    """A server, and a client without any library that would hide something."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=(\S+)", first)
        assert found, first
        self.address, self.token = found[0], found[1]
        self.host = urlsplit(self.address).netloc
        self._open: list[http.client.HTTPConnection | http.client.HTTPResponse] = []

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self.host, timeout=PATIENCE_SECONDS)
        self._open.append(connection)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        self._open.append(response)
        return response

    def close(self) -> None:
        for opened in self._open:
            opened.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        assert (self.process.returncode, errors) == (0, "")

    def events(self, **headers: str) -> Iterator[dict[str, Any]]:
        """What is sent until it ends; comments too."""
        response = self.get(f"/events?token={self.token}", **headers)
        assert response.status == 200
        event: dict[str, Any] = {}
        while text := response.readline().decode():
            if text == "\n":
                yield event
                event = {}
                continue
            key, _, value = text.rstrip("\n").partition(": ")
            event[key or "comment"] = value


@pytest.fixture
def served(sandbox: Any) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*arguments: str | Path) -> Served:
        started.append(Served(sandbox.start_farandole("watch", *arguments)))
        return started[-1]

    yield start
    for server in started:
        server.close()


def test_a_run_live_for_whoever_has_the_token(
    served: Callable[..., Served], tmp_path: Path
) -> None:
    metrics = begin_run(tmp_path / "runs" / "one")
    server = served("runs/one", "--target", "accuracy=0.9")

    # Who has no token, a wrong one, or another name for this server, learns nothing.
    whole = f"/?token={server.token}"
    refused = [("/", {}), ("/?token=wrong", {}), ("/events", {}), ("/other", {})]
    refused += [(whole, {"Host": name}) for name in ("evil.example", "127.0.0.1", "localhost:1")]
    for path, headers in refused:
        answer = server.get(path, **headers)
        assert answer.status == 403, (path, headers)
        body = answer.read().decode()
        assert server.token not in body
        assert "daso" not in body
    assert server.get(f"/other?token={server.token}").status == 404
    page = server.get(whole)
    assert page.status == 200
    policy = page.headers["Content-Security-Policy"]
    assert "script-src 'sha256-" in policy
    assert "connect-src 'self'" in policy
    assert page.headers["Cache-Control"] == "no-store"
    assert "daso" in page.read().decode()

    # The first event is the whole state; a change is sent when it comes.
    events = server.events()
    first = next(events)
    assert first["event"] == "state"
    (lane,) = json.loads(first["data"])["data"]["lanes"]
    assert (lane["name"], lane["outcome"]) == ("daso", "running")
    append(metrics, line("log", 2.0, accuracy=0.95) + line("end", 2.5))
    second = next(event for event in events if event.get("id") not in (None, first["id"]))
    sent = json.loads(second["data"])
    assert sent["data"]["lanes"][0]["logs"]["metric"]["accuracy"] == [0.5, 0.95]
    assert sent["data"]["lanes"][0]["outcome"] == "ok"
    assert "reached accuracy ≥ 0.9" in sent["title"]

    # Whoever has that state is sent nothing; who has an older one gets the newest.
    again = server.events(**{"Last-Event-ID": second["id"]})
    assert "comment" in next(again)
    older = server.events(**{"Last-Event-ID": first["id"]})
    assert next(older)["id"] == second["id"]

    # Ctrl-C ends it, and says so.
    server.process.send_signal(signal.SIGINT)
    assert [event.get("event") for event in events if "comment" not in event] == ["end"]


def test_a_port_that_is_taken_and_a_folder_that_is_none(
    served: Callable[..., Served], sandbox: Any, tmp_path: Path
) -> None:
    begin_run(tmp_path / "runs" / "one")
    server = served("runs/one")
    port = server.host.rpartition(":")[2]
    done = sandbox.farandole("watch", "runs/one", "--port", port)
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr
    assert sandbox.farandole("watch", "runs/two").returncode == 2
    with pytest.raises(UserError, match="is no folder"):
        WatchedFolder(tmp_path / "runs" / "two")


def test_a_race_under_way_shows_what_is_over_what_runs_and_what_waits(tmp_path: Path) -> None:
    entries = tuple(Entry(sync, 2) for sync in ("allreduce", "daso", "lagged"))
    failed = RunRecord(1, 0, "1-allreduce", "failed", "rank 1: no luck")
    record = RaceRecord(("train.py",), entries, (0,), "accuracy=0.9", runs=(failed,), price=2.0)
    record.write(tmp_path)
    begin_run(tmp_path / "1-allreduce")
    metrics = begin_run(tmp_path / "2-daso")
    (tmp_path / "2-daso" / "output.log").touch()
    watched = WatchedFolder(tmp_path)
    with locked(tmp_path):
        found = watched.look()
        assert [lane.outcome for lane in found.lanes] == ["failed", "running", "waiting"]
        assert [lane.price for lane in found.lanes] == [2.0, 2.0, 2.0]
        assert found.target is not None
        before = state_of(found)
        assert state_of(watched.look()).id == before.id, "nothing has changed"
        assert b"no luck" in before.event
        append(metrics, line("log", 3.0, accuracy=0.8))
        after = watched.look()
        assert state_of(after).id != before.id
        assert len(after.lanes[1].history.points) == 2
    outcomes = [lane.outcome for lane in watched.look().lanes]
    assert outcomes == ["failed", "unfinished", "waiting"], "the race has ended"


def test_any_folder_of_runs_and_one_that_is_still_empty(tmp_path: Path) -> None:
    watched = WatchedFolder(tmp_path)
    assert watched.look().lanes == ()
    assert b"Nothing was raced" in state_of(watched.look()).event
    begin_run(tmp_path / "trial-1")
    append(begin_run(tmp_path / "trial-0"), line("end", 2.0))
    lanes = watched.look().lanes
    assert [(lane.name, lane.outcome) for lane in lanes] == [
        ("trial-0", "ok"),
        ("trial-1", "running"),
    ]


def test_the_browser_gets_the_token_from_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Path] = []

    def open_page(address: str) -> bool:
        assert "secret" not in address, "it would be in the list of processes"
        page = Path(urlsplit(address).path)
        assert "?token=secret" in page.read_text()
        assert page.parent.stat().st_mode & 0o077 == 0
        opened.append(page)
        return False

    monkeypatch.setattr("webbrowser.open", open_page)
    with announce(tmp_path, browser=True) as ready:
        ready("http://127.0.0.1:1/?token=secret")
    said = capsys.readouterr()
    assert "http://127.0.0.1:1/?token=secret" in said.out
    assert "no browser could be opened" in said.err
    assert not opened[0].exists()
    with announce(tmp_path, browser=False) as ready:
        ready("http://127.0.0.1:1/?token=secret")
    assert len(opened) == 1
