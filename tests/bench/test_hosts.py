"""Benchmarks on several hosts: what is refused before anything starts."""

from __future__ import annotations

import sys

import pytest

from farandole.cli import main

ELSEWHERE = ("-H", "far.invalid:2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("comm", *ELSEWHERE, "--json", "x.json"),
            "rank 0 is on host far.invalid, and would write",
        ),
        (("comm", *ELSEWHERE, "--against", "mpi"), "mpirun starts ranks on this host only, and "),
        (("comm", "--here", *ELSEWHERE), "--here: the launcher says where the ranks are"),
        (("comm", "-H", "localhost:1"), "-n 1: an all-reduce needs at least 2 ranks"),
        (("comm", "-n", "3", *ELSEWHERE), "3 workers on 2 slots (far.invalid:2)"),
        (("comm",), "how many ranks? Give -n, such as -n 4, or hosts"),
        (
            ("train", *ELSEWHERE, "--model", "mlp", "--json", "x.json"),
            "--json x.json: rank 0 is on",
        ),
    ],
)
def test_bad_input(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["farandole", "bench", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
