"""The random states of a process: torch's, Python's and NumPy's.

Any of them may decide what a model does.

Torch's generator has a lock of its own, which `get_rng_state` holds while it makes a Python object.
Then Python may collect garbage, and go on with another thread. If that one wants the generator too,
it waits for its lock with the interpreter in its hands, and the first one for the interpreter, for
ever. So threads take turns here, by a lock of Python's, which is waited for without it.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch

_MOST_FOR_NUMPY = 2**32
_TURN = threading.RLock()  # a finalizer may come here in the middle of its own thread's turn


class RandomStates:
    """Those of now."""

    def __init__(self) -> None:
        with _TURN:
            self._torch = [torch.get_rng_state()]
            if torch.cuda.is_initialized():
                self._torch.append(torch.cuda.get_rng_state())
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RandomStates)
            and len(self._torch) == len(other._torch)
            and all(map(torch.equal, self._torch, other._torch))
            and self._python == other._python
            # The position in the generator's block of numbers. It moves with every draw, and the
            # block only when it is used up.
            and self._numpy[2:] == other._numpy[2:]
            and bool((self._numpy[1] == other._numpy[1]).all())
        )

    __hash__ = None  # type: ignore[assignment]

    def put_back(self) -> None:
        with _TURN:
            torch.set_rng_state(self._torch[0])
            if len(self._torch) > 1:
                torch.cuda.set_rng_state(self._torch[1])
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def set_seed(seed: int) -> None:
    """Of all of them."""
    with _TURN:
        if torch.cuda.is_initialized():
            torch.manual_seed(seed)
        else:  # else every call is noted, with its stack, for the time when CUDA is
            torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _MOST_FOR_NUMPY)
