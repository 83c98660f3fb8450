"""`farandole run` forks its workers where that pays, and says how to turn it off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.fresh

HOW = """
import os, sys
how = 'forked' if 'Preloaded' in {type(finder).__name__ for finder in sys.meta_path} else 'fresh'
import torch
print(how)
"""


def test_three_workers_of_a_job_are_forked_unless_told_otherwise(sandbox: Sandbox) -> None:
    script = sandbox.script("how.py", HOW)
    for words, expected in {
        ("-n", "3"): "forked",
        ("-n", "3", "--no-fork"): "fresh",
        ("-n", "2"): "fresh",
    }.items():
        done = sandbox.farandole("run", *words, script)
        assert done.returncode == 0, done.stderr
        assert {line.split()[1] for line in done.stdout.splitlines()} == {expected}, words
        assert "the script sets" not in done.stderr
    assert list(sandbox.temporary.glob("farandole-*")) == []
