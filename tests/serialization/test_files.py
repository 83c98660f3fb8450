"""Values in a file, and back."""

from __future__ import annotations

from pathlib import Path

import torch

from farandole.serialization.files import read_value, write_value


def test_a_file_brings_values_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    value = {"a": [shared, shared.T, shared[0]], 3: (None, float("inf"), torch.tensor(True))}
    write_value(tmp_path / "p", value)
    found = read_value(tmp_path / "p")
    assert [tensor.tolist() for tensor in found["a"]] == [t.tolist() for t in value["a"]]
    assert found[3][:2] == (None, float("inf"))
    assert found[3][2].dtype is torch.bool
    write_value(tmp_path / "p", None)
    assert read_value(tmp_path / "p") is None
