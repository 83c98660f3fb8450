"""What an elastic job cannot do: refused at its start, not when a worker is lost."""

from __future__ import annotations

import torch
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from farandole.data import Loader
from farandole.environment import PRETEND_HOSTS
from farandole.errors import NotElasticError, UserError
from farandole.layout import Layout
from farandole.sync import Strategy
from farandole.train.settings import Settings

_OTHERWISE = (
    "With --restarts R, all workers start again from the last checkpoint instead. Without --min "
    "and --restarts, a lost worker ends the job."
)


def require_elastic_strategy(strategy: Strategy) -> None:
    why = strategy.why_not_elastic
    if why is not None:
        raise NotElasticError(
            f"--sync {strategy} is not there for jobs whose workers come and go: {why}. Take "
            f"--sync allreduce. {_OTHERWISE}"
        )


def require_elastic_model(optimizer: Optimizer | None, models: int) -> None:
    if models:
        raise NotElasticError(
            "a job whose workers come and go trains one model, and this is the second. Put both "
            f"into one torch.nn.ModuleList. {_OTHERWISE}"
        )
    if optimizer is None:
        raise NotElasticError(
            "a worker that joins later gets the optimizer's state from the others: write "
            f"`model, opt = run.distribute(model, opt)`. {_OTHERWISE}"
        )


def require_elastic_loader(loader: Loader, most_workers: int) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise NotElasticError(
            "what a lost worker had read of an iterable dataset cannot be read again: pass a "
            f"dataset with a length. {_OTHERWISE}"
        )
    batch = loader.options.global_batch(most_workers)
    if batch < most_workers:
        raise UserError(
            f"a global batch of {batch} cannot be shared by the up to {most_workers} workers of "
            f"this job. Use global_batch_size >= {most_workers}, or a smaller --max."
        )


def require_elastic_device(device: torch.device) -> None:
    if device.type != "cpu":
        raise NotElasticError(
            f"workers that come and go compute on CPUs so far, and this one has {device}: NCCL "
            "does not outlive a lost rank. Set CUDA_VISIBLE_DEVICES= to hide the GPUs. "
            f"{_OTHERWISE}"
        )


def require_elastic_settings(settings: Settings) -> None:
    if settings.pretend_hosts is not None:
        raise refuse(f"{PRETEND_HOSTS}={settings.pretend_hosts} (pretended hosts)")
    if settings.trace is not None or settings.trace_parts is not None:
        raise refuse("a trace, which has one part for each rank,")


def refuse_trainer_options(precision: torch.dtype | None, layout: Layout | None) -> None:
    if layout is not None:
        raise refuse(f"layout {layout}")
    if precision is torch.float16:
        raise refuse("precision=torch.float16, whose scale a new worker would not know,")


def refuse(what: str) -> NotElasticError:
    """The error for some other thing that is not there in such jobs."""
    return NotElasticError(f"{what} is not there for jobs whose workers come and go. {_OTHERWISE}")
