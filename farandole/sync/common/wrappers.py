"""Wrappers of other libraries that would keep a model in step a second time.

DistributedDataParallel averages gradients in every step, and so cancels every strategy but
all-reduce, which it repeats. Libraries put it around a model without being asked: Accelerate does
in `prepare`.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from farandole.errors import UserError
from farandole.sync.common.hooks import ForwardHook


def _wrappers() -> tuple[type[nn.Module], ...]:
    sharded = sys.modules.get("torch.distributed.fsdp")  # slow to import, and seldom there
    more = () if sharded is None else (sharded.FullyShardedDataParallel,)
    return (DistributedDataParallel, DataParallel, *more)


def refuse_wrapped(model: nn.Module) -> None:
    """Before training: the model must not hold such a wrapper."""
    for name, module in model.named_modules():
        if isinstance(module, _wrappers()):
            where = f"its part {name!r}" if name else "it"
            raise UserError(
                f"run.distribute was given a {type(model).__name__}, and {where} is a "
                f"{type(module).__name__}: both would keep the replicas in step. Give "
                "run.distribute the plain model."
            )


def refuse_wrapper_around(model: nn.Module) -> None:
    """In the first forward pass: nobody has put such a wrapper around the model since."""

    def look() -> None:
        hook.remove()
        caller = DistributedDataParallel._active_ddp_module
        if caller is not None and any(module is model for module in caller.modules()):
            raise UserError(
                "a DistributedDataParallel was put around the model after run.distribute: it "
                "averages gradients in every step by itself, and cancels the strategy. Train the "
                "model that run.distribute returned. (Accelerate's prepare() and Hugging Face's "
                "Trainer do so: call run.hide_from_libraries() before. See docs/frameworks.md.)"
            )

    hook = model.register_forward_pre_hook(ForwardHook(look))
