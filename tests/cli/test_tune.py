"""What `farandole tune` refuses before its first trial."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.cli import main

pytestmark = pytest.mark.needs("optuna")
SCRIPT = "import farandole as fd\n\nfd.init().log(accuracy=1.0)\n"
STUDY = ("--metric", "accuracy", "--trials", "1")


@pytest.mark.parametrize(
    ("arguments", "complaints"),
    [
        (("train.py",), ["which metric counts?"]),
        (
            ("train.py", "--metric", "accuracy", "--trials", "3"),
            ["--metric after the script is the script's own", "which metric counts?"],
        ),
        (("--metric", "accuracy", "train.py"), ["how many trials?"]),
        (("--metric", "accuracy", "--trials", "0", "train.py"), ["--trials 0: give 1 or more"]),
        ((*STUDY, "trian.py"), ["Did you mean 'train.py'?"]),
        ((*STUDY, "--storage", "folder", "train.py"), ["is a folder: give a file"]),
        ((*STUDY, "--storage", "train.py", "train.py"), ["train.py cannot be read as the file of"]),
        ((*STUDY, "--storage", "text.db", "train.py"), ["text.db cannot be read as the file of"]),
        ((*STUDY, "--timeout", "0", "train.py"), ["--timeout 0"]),
        ((*STUDY, "--sync", "alreduce", "train.py"), ["Did you mean 'allreduce'?"]),
        ((*STUDY, "--generations", "2", "train.py"), ["--generations is for --populations N"]),
        (
            (*STUDY, "--populations", "2", "--generations", "1", "train.py"),
            ["--trials 1 and --populations 2"],
        ),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    complaints: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("train.py", "text.db"):
        (tmp_path / name).write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", ["farandole", "tune", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    for complaint in complaints:
        assert complaint in said
    assert (tmp_path / "train.py").read_text() == SCRIPT
    assert (tmp_path / "text.db").read_text() == SCRIPT
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"folder", "train.py", "text.db"}, "nothing was begun"
