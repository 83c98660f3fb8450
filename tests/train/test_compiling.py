"""What takes long at the first step is announced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import farandole as fd
from farandole.train.compiling import NOTE, is_compiled


def test_a_model_that_will_be_compiled_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with fd.init() as run:
        run.distribute(nn.Linear(2, 2))
        assert NOTE not in capsys.readouterr().out
        run.distribute(torch.compile(nn.Linear(2, 2), backend="eager"))
        assert NOTE in capsys.readouterr().out


def test_both_ways_to_compile_are_known() -> None:
    inside = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(inside)
    inside[0].compile(backend="eager")
    assert is_compiled(inside)
    assert is_compiled(torch.compile(nn.Linear(2, 2), backend="eager"))
