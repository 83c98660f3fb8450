"""A value in a file: its tensors as safetensors, the tree around them as JSON in the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from farandole.errors import CheckpointError, UserError
from farandole.serialization import pack, unpack


def write_parcel(path: Path, value: Any, what: str) -> None:
    """Whole or not at all. Raises `UserError` about `what`, naming a part that cannot travel."""
    try:
        tree, tensors = pack(value)
    except CheckpointError as error:
        part = str(error).partition(", which")[0]
        raise UserError(
            f"{what} cannot travel between processes: {part}. Numbers, strings, tensors, and "
            "lists, tuples and dicts of these can."
        ) from None
    # Copies: two tensors of one memory, or a part of a larger one, are no safetensors.
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    half = path.with_suffix(".half")
    save_file(whole, half, metadata={"tree": json.dumps(tree)})
    half.replace(path)


def read_parcel(path: Path) -> Any:
    """What was written."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return unpack(json.loads(file.metadata()["tree"]), tensors)
