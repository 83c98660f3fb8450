"""A whole tensor that the plain model has as a view of something that is divided here.

In the plain model, a change of the view in place changes its original. Here the view is a copy. So
after such a change, any use of the original is an error that says that it is out of date.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from farandole.layout.shards.batch_shard import invalidate, same_memory, version_of
from farandole.layout.tiles.core.tile import Divided


class Snapshot(torch.Tensor):
    """Made by `snapshot`."""

    sources: Sequence[weakref.ref[Divided]]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(each not in _KNOWN for each in types):  # it is theirs to say what comes of it
            return NotImplemented
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Snapshot)]
        versions = [version_of(plain(each)) for each in given]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for each, version in zip(given, versions, strict=True):
            if version != version_of(plain(each)):
                # The plain model would have changed the source as well. The copy here has not, so
                # the source must not be read any more.
                for source in each.sources:
                    invalidate(source(), func)

        def marked(leaf: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                sources = [each.sources for each in given if same_memory(leaf, each)]
            return snapshot(leaf, sources[0]) if sources else plain(leaf)

        return pytree.tree_map_only(torch.Tensor, marked, result)


_KNOWN = (torch.Tensor, torch.nn.Parameter, Snapshot)


def snapshot(tensor: torch.Tensor, sources: Sequence[weakref.ref[Divided]]) -> Snapshot:
    with torch._C.DisableTorchFunctionSubclass():
        made = tensor.as_subclass(Snapshot)
    made.sources = sources
    return made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor) if isinstance(tensor, Snapshot) else tensor
