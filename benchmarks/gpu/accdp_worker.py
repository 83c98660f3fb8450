"""accdp_worker.py OUT CASE…: one worker of `accdp.py`. A case is `batch,side,eager|compiled`.

In the same processes and over the same NCCL, sides take turns: Farandole and PyTorch's DDP (one
worker alone: and a plain loop). Compiled, DDP takes part twice: as PyTorch's documentation has it,
`torch.compile(DDP(model))`, which compiles a piece for each bucket, and as `ddp_of_compiled`,
`DDP(torch.compile(model))`, one graph like ours. bf16 autocast, channels-last, SGD.

With `-` for OUT nothing is measured: one worker compiles both sides of each case, so that others
find what the compiler made in its cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.comm import C10d
from farandole.models import build

STEPS, WARM = 8, 6
FEWEST_TURNS, MOST_TURNS, TURN_SECONDS = 6, 14, 8.0
"""Turns of steps that take long differ little: after so many seconds the fewest are enough."""


class Side:
    """A model under one way of training, and the loop that is timed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rates: list[float] = []

    def train(self, images: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast(images.device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()


def fresh(
    device: torch.device, side: int, compiled: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = build("resnet50", image_size=side).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return (torch.compile(model) if compiled else model), optimizer  # type: ignore[return-value]


def sides_of(run: fd.Run, side: int, compiled: bool) -> dict[str, Side]:
    sides = {"farandole": Side(*run.distribute(*fresh(run.device, side, compiled)))}
    model, optimizer = fresh(run.device, side, compiled)
    carrier = run.group.transport.carrier(torch.empty(0, device=run.device))
    if run.size == 1:
        sides["plain"] = Side(model, optimizer)
    elif isinstance(carrier, C10d) and carrier.has_nccl:
        if compiled:
            sides["ddp_of_compiled"] = Side(under_ddp(model, run.device), optimizer)
            model, optimizer = fresh(run.device, side, False)
        wrapped = under_ddp(model, run.device)
        sides["ddp"] = Side(torch.compile(wrapped) if compiled else wrapped, optimizer)  # type: ignore[arg-type]
    return sides


def under_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    ids = None if device.index is None else [device.index]
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


def batch_of(run: fd.Run, batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(batch, 3, side, side, device=run.device)
    images = images.to(memory_format=torch.channels_last)
    return images, torch.randint(1000, (batch,), device=run.device)


def compile_both(run: fd.Run, batch: int, side: int) -> None:
    """DDP is compiled in pieces, one for each of its buckets: other ones than the whole model."""
    if not dist.is_initialized():
        backend = "nccl" if run.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    images, labels = batch_of(run, batch, side)
    ours = Side(*run.distribute(*fresh(run.device, side, True)))
    model, optimizer = fresh(run.device, side, False)
    theirs: Any = torch.compile(under_ddp(model, run.device))
    for each in (ours, Side(theirs, optimizer)):
        each.train(images, labels, 2)


def measure(run: fd.Run, batch: int, side: int, compiled: bool) -> dict[str, Any]:
    images, labels = batch_of(run, batch, side)
    sides = sides_of(run, side, compiled)
    torch.cuda.reset_peak_memory_stats()
    for each in sides.values():
        each.train(images, labels, WARM)
    spent = 0.0  # the same on all ranks
    for turn in range(MOST_TURNS):
        if turn >= FEWEST_TURNS and spent > TURN_SECONDS:
            break
        for name in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            run.group.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            sides[name].train(images, labels, STEPS)
            torch.cuda.synchronize()
            seconds = max(run.group.gather_json(time.perf_counter() - begin))
            spent += seconds
            sides[name].rates.append(run.size * batch * STEPS / seconds)
    carrier = run.group.transport.carrier(torch.empty(0, device=run.device))
    found: dict[str, Any] = {
        "workers": run.size,
        "batch": batch,
        "side": side,
        "compiled": compiled,
        "carried_by": carrier.name if run.size > 1 else "",
        "images_per_second": {n: statistics.median(s.rates) for n, s in sides.items()},
        "all": {n: [round(rate, 1) for rate in s.rates] for n, s in sides.items()},
        "peak_memory_mib": torch.cuda.max_memory_allocated() // 2**20,
    }
    for other in [name for name in sides if name != "farandole"]:
        pairs = zip(sides["farandole"].rates, sides[other].rates, strict=True)
        found[f"ratio_to_{other}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return found


def main() -> None:
    out, *cases = sys.argv[1:]
    run = fd.init(timeout=400)
    torch.backends.cudnn.benchmark = True
    rows = []
    for case in cases:
        batch, side, mode = case.split(",")
        if out == "-":
            compile_both(run, int(batch), int(side))
            continue
        row = measure(run, int(batch), int(side), mode == "compiled")
        rows.append(row)
        run.print(json.dumps({key: value for key, value in row.items() if key != "all"}))
        if run.rank == 0:
            Path(out).write_text(json.dumps(rows, indent=1))
        torch.compiler.reset()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


main()
