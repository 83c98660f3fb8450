"""A tree in one file: its tensors as safetensors, the JSON around them in the file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from farandole.serialization.trees import pack, unpack


def write_value(path: Path, value: Any) -> None:
    """Writes the whole file or nothing. Raises `NotSerializableError`."""
    tree, tensors = pack(value)
    # Copies: safetensors refuses tensors that share memory, and parts of larger ones.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    unfinished = path.with_suffix(".half")
    save_file(copies, unfinished, metadata={"tree": json.dumps(tree)})
    unfinished.replace(path)


def read_value(path: Path) -> Any:
    """What was written."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return unpack(json.loads(file.metadata()["tree"]), tensors)
