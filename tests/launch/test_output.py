"""The workers' output arrives whole, marked, at once, and to its last byte."""

from __future__ import annotations

import io
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from farandole.launch.output import Relay, Source

if TYPE_CHECKING:
    from conftest import Sandbox

ALTERNATING = """
import os
for number in range(400):
    os.write(1 + number % 2, f"line {number}\\n".encode())
"""


class Written(io.BytesIO):
    """A stream that remembers what had been written by each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed = b""

    def flush(self) -> None:
        self.flushed = self.getvalue()


class Closed(io.BytesIO):
    """A pipe whose reader has gone."""

    def write(self, data: object) -> int:
        raise BrokenPipeError


def test_pieces_of_a_line_wait_for_its_end(tmp_path: Path) -> None:
    shown = Written()
    source = Source(tmp_path / "out", "[1] ", shown)
    source.pass_on()  # there is no file yet
    with (tmp_path / "out").open("wb", buffering=0) as worker:
        worker.write(b"loss ")
        source.pass_on()
        assert shown.flushed == b""
        worker.write(b"0.5\nloss")
        source.pass_on()
        assert shown.flushed == b"[1] loss 0.5\n"
        worker.write(b" 0.4")
        source.pass_on(last=True)
    assert shown.flushed == b"[1] loss 0.5\n[1] loss 0.4\n"
    source.close()


def test_a_progress_bar_shows_each_of_its_states(tmp_path: Path) -> None:
    shown = Written()
    (tmp_path / "out").write_bytes(b"10 %\r20 %\r30 %\nend\r\n")
    source = Source(tmp_path / "out", "[0] ", shown)
    source.pass_on(last=True)
    assert shown.flushed == b"[0] 10 %\n[0] 20 %\n[0] 30 %\n[0] end\n"
    source.close()


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\r", b"")), max_size=8))
@settings(max_examples=50, deadline=None)
def test_every_byte_arrives_however_it_was_cut(pieces: list[bytes]) -> None:
    shown = Written()
    whole = b"".join(pieces)
    with tempfile.NamedTemporaryFile(buffering=0) as worker:
        source = Source(Path(worker.name), "", shown)
        for piece in pieces:
            worker.write(piece)
            source.pass_on()
        source.pass_on(last=True)
        source.close()
    assert shown.getvalue() == whole + (b"\n" if whole and not whole.endswith(b"\n") else b"")


def test_output_is_passed_on_while_the_worker_runs(tmp_path: Path) -> None:
    shown = Written()
    relay = Relay([Source(tmp_path / "out", "[0] ", shown)])
    relay.start()
    (tmp_path / "out").write_bytes(b"first\nunfinished")
    while not shown.flushed:  # pytest's timeout ends a wait in vain
        time.sleep(0.01)
    assert shown.flushed == b"[0] first\n"
    relay.stop()
    assert shown.flushed == b"[0] first\n[0] unfinished\n"


def test_a_reader_that_has_gone_stops_nobody_else(tmp_path: Path) -> None:
    shown = Written()
    (tmp_path / "out").write_bytes(b"line\n")
    relay = Relay(
        [Source(tmp_path / "out", "[0] ", Closed()), Source(tmp_path / "out", "[1] ", shown)]
    )
    relay.start()
    relay.stop()
    assert shown.flushed == b"[1] line\n"


def test_output_and_errors_keep_their_order_where_both_are_shown(sandbox: Sandbox) -> None:
    script = sandbox.script("alternating.py", ALTERNATING)
    command = shlex.join([sys.executable, "-m", "farandole", "run", "-n", "2", str(script)])
    done = sandbox.run(["sh", "-c", f"{command} 2>&1"])
    assert done.returncode == 0
    for rank in range(2):
        mark = f"[{rank}] "
        shown = [line.removeprefix(mark) for line in done.stdout.splitlines() if mark in line]
        assert shown == [f"line {number}" for number in range(400)]


def test_output_and_errors_stay_apart_where_they_are_shown_apart(sandbox: Sandbox) -> None:
    done = sandbox.farandole("run", "-n", "1", sandbox.script("alternating.py", ALTERNATING))
    assert done.stdout.splitlines() == [f"[0] line {number}" for number in range(0, 400, 2)]
    assert done.stderr.splitlines() == [f"[0] line {number}" for number in range(1, 400, 2)]
