"""Names outside of the locale's characters: scripts, arguments, folders."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Sandbox

SCRIPT = """
import os, sys
import farandole as fd

run = fd.init()
run.log(loss=0.5)
run.print(f"{run.name} {os.fsencode(sys.argv[1])!r}")
run.close()
if sys.argv[2:]:
    raise ValueError(sys.argv[2])
"""
NAME = os.fsdecode(b"tr\xc3\xa9s-\xff.py")  # an accent, and a byte that is no character in UTF-8
ARGUMENT = os.fsdecode(b"d\xc3\xa9but-\xfe")
POSIX = {"LC_ALL": "POSIX"}
ASCII = POSIX | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("locale", [POSIX, ASCII, {"LC_ALL": "C.UTF-8"}], ids=str)
def test_a_script_whose_name_is_outside_of_the_locale(
    sandbox: Sandbox, locale: dict[str, str]
) -> None:
    # Three workers are forked. The last of them fails, and its error holds such a name too.
    workers = "3" if locale is POSIX else "1"
    (sandbox.folder / NAME).write_text(SCRIPT)
    words = ["-m", "farandole", "run", "-n", workers, NAME, ARGUMENT, ARGUMENT]
    done = sandbox.python(*words, **locale, PYTHONIOENCODING="")
    assert done.returncode == 1, done.stderr
    assert "UnicodeEncodeError" not in done.stderr
    assert "ValueError" in done.stderr
    assert f"{os.fsencode(ARGUMENT)!r}" in done.stdout
    (run,) = (sandbox.folder / "runs").iterdir()
    assert (run / "metrics.jsonl").exists()
    assert list(run.glob("events.out.tfevents.*")), "TensorBoard takes the folder's name"


def test_a_folder_that_tensorboard_cannot_take(sandbox: Sandbox) -> None:
    script = sandbox.script("train.py", SCRIPT)
    done = sandbox.fork("-m", "farandole", "run", "--runs", ARGUMENT, script, "x", **POSIX)
    assert done.returncode == 0, done.stderr
    assert "TensorBoard cannot write to" in done.stderr
    (metrics,) = (sandbox.folder / ARGUMENT).glob("*/metrics.jsonl")
    assert "loss" in metrics.read_text()


def test_what_the_command_prints(sandbox: Sandbox) -> None:
    program = (
        "import os\nfrom farandole.cli.encoding import print_any_character\n"
        "print_any_character()\nprint(os.fsdecode(bytes([255])) + chr(0x2026))"
    )
    for locale, said in ((ASCII, b"\xff?\n"), ({"LC_ALL": "C.UTF-8"}, b"\xff\xe2\x80\xa6\n")):
        environment = sandbox.environment | locale
        assert subprocess.check_output([sys.executable, "-c", program], env=environment) == said
