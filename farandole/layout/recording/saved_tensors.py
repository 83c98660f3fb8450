"""Looks at what autograd saves for a backward pass, without being in the way of the model.

Transforms of torch.func (`grad`, `vjp`, `hessian`) refuse to run while somebody looks. So whoever
looks here steps aside for them, and does not see what they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch.autograd import graph

Note = Callable[[int, int], None]
"""Is told where a saved tensor lies, and how many bytes there are."""
_LOOKING: ContextVar[graph.saved_tensors_hooks | None] = ContextVar(
    "farandole.saved_tensors", default=None
)


@contextmanager
def saved_tensors_noted(note: Note) -> Iterator[None]:
    """Inside, `note` is called for every tensor that is saved, except sparse ones."""
    _step_aside_for_transforms()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        noted(tensor, note)
        return tensor

    hooks = graph.saved_tensors_hooks(pack, _given_back)
    token = _LOOKING.set(hooks)
    try:
        with hooks:
            yield
    finally:
        _LOOKING.reset(token)


def noted(tensor: torch.Tensor, note: Note) -> None:
    try:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # of sparse tensors, and of those in compilers
        return
    note(place, size)


def _given_back(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _step_aside_for_transforms() -> None:
    """From now on, in this process. It can be called any number of times."""
    disable: Callable[[str], AbstractContextManager[None]] = graph.disable_saved_tensors_hooks
    if getattr(disable, "__module__", "") == __name__:
        return

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        looking = _LOOKING.get()
        if looking is None or not _is_on_top(looking):
            with disable(message):
                yield
            return
        # Hooks are a stack. They may be taken off only while they are on top, and are put back in
        # the same place.
        looking.__exit__()
        try:
            with disable(message):
                yield
        finally:
            looking.__enter__()

    graph.disable_saved_tensors_hooks = disabled  # type: ignore[assignment]


def _is_on_top(hooks: graph.saved_tensors_hooks) -> bool:
    """Whether nobody else has begun to look since."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and top[0] is hooks.pack_hook
