"""Models whose layers mix samples, on the tiles of two real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = Path(__file__).parents[1] / "scripts" / "share_facts.py"


def test_they_train_as_the_plain_model_or_are_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    done = sandbox.farandole("run", "-n", "2", SCRIPT, tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert len(found) == 15
    for case, off in found.items():
        if case.startswith("hook "):
            assert "register_hook is not possible with a tensor that is divided" in off, off
            assert "without tiles" in off
            continue
        assert isinstance(off, float), (case, off)
        assert off < 1e-10, case
        assert other[case] == off, case
