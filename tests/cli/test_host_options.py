"""Options that do not go with workers on other hosts: refused by name, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.cli import main

ELSEWHERE = ("-H", "localhost:1,far.invalid:1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", *ELSEWHERE, "--servers", "1"), "parameter servers that a job starts can be "),
        (("run", *ELSEWHERE, "--sync", "server"), "workers are on far.invalid. Start them with "),
        (("run", *ELSEWHERE, "--pretend-hosts", "2"), "--pretend-hosts 2 is for workers of one "),
        (("run", *ELSEWHERE, "--sync", "hogwild"), "hogwild"),
        (("run", *ELSEWHERE, "-n", "3"), "3 workers on 2 slots (localhost:1, far.invalid:1)"),
        (("run", "--ssh-port", "22"), "--ssh-port 22 is for other hosts"),
        (("race", *ELSEWHERE, "--sync", "server"), "lane server: server needs parameter servers"),
        (
            ("race", *ELSEWHERE, "--sync", "daso", "--pretend-hosts", "2"),
            "there are real ones: far",
        ),
        (("race", "--sync", "daso"), "how many workers has each lane? Give -n 2, say, or hosts"),
        (("doctor", "--script"), "--script train.py is for several hosts: name them with -H"),
    ],
)
def test_bad_input(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["farandole", *words, "train.py"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
