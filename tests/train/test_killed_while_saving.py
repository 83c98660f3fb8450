"""SIGKILL at any moment of a save: the newest checkpoint can be loaded, and it is the last one
that the script was told about, or the one after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "scripts" / "killed_while_saving.py"


def test_killed_while_saving(sandbox: Any, tmp_path: Path) -> None:
    done = sandbox.fork(SCRIPT, tmp_path, "12")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 12
    before = -1  # the newest checkpoint of the process before
    for answer in answers:
        assert answer["count"] in (answer["told"] - 1, answer["told"])
        assert answer["number"] == before + 1 + answer["count"]
        assert answer["weights"] == [float(answer["count"])]  # one save, not a mix of two
        assert len(answer["half"]) <= 1  # half-written ones do not pile up
        before = answer["number"]
    assert any(answer["half"] for answer in answers), "no kill came in the middle of a save"


def test_killed_while_saving_in_the_background(sandbox: Any, tmp_path: Path) -> None:
    done = sandbox.fork(SCRIPT, tmp_path, "8", "background")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 8
    for answer in answers:
        # What the script was told of last may not be there yet; the one before it must be.
        assert answer["told"] - 2 <= answer["count"] <= answer["told"]
        assert answer["weights"] == [float(answer["count"])]  # one save, not a mix of two
        assert len(answer["half"]) <= 1
    assert any(answer["half"] for answer in answers), "no kill came in the middle of a save"
