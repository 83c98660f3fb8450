"""The random state of a process: seeding, and saving it so that a resumed run draws the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch.

    All ranks get the same seed on purpose: a split or a synthetic dataset drawn in the script is
    then the same on every rank. The loader gives each rank its own samples anyway.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def random_state(device: torch.device) -> dict[str, Any]:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def random_state_from(seed: int, device: torch.device) -> dict[str, Any]:
    """As `seed_everything` makes it. Leaves that of this process as it is."""
    own = random_state(device)
    try:
        seed_everything(seed)
        return random_state(device)
    finally:
        restore_random_state(own, device)


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
