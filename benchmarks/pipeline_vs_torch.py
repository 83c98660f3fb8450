"""Our pipelines against torch.distributed.pipelining: the same model, cut and processes.

Both sides train the same blocks, cut in the same places, by GPipe and 1F1B with the same
micro-batches, in the same processes, step after step in turn. Torch's side talks through gloo, as
it does on CPUs; ours through what `fd.init` chose, which is shared memory on one host. On GPUs both
talk through NCCL. Both end a step with the optimizer's. The target is a ratio of at most 1.

    python benchmarks/pipeline_vs_torch.py -n 2
    python benchmarks/pipeline_vs_torch.py -n 2 --per-gpu        # the workers share one GPU
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import RESULTS, restart_on_workers, save, spread
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import farandole as fd
from farandole.train.settings import Settings

TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Block(nn.Module):
    """One block, which is not taken apart, as a sequence would be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


def network(blocks: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def ours(
    run: fd.Run, model: nn.Sequential, schedule: str, micros: int, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], float]:
    settings = Settings(name=f"ours-{schedule}", folder=run.folder, script="benchmark")
    own = fd.Run(run.group, run.topology, run.device, settings=settings)
    per_stage = len(model) // run.size
    layout = fd.Layout(
        stages=run.size,
        microbatches=micros,
        schedule=schedule,  # type: ignore[arg-type]
        balance=(per_stage,) * run.size,
    )
    trainer = own.trainer(
        model,
        F.mse_loss,
        lambda ps: torch.optim.SGD(ps, 0.01),
        layout=layout,
        check=False,  # what is measured is training
    )

    def step() -> float:
        return float(trainer.step(x, y))

    return step


def torchs(
    run: fd.Run, model: nn.Sequential, schedule: str, micros: int, x: torch.Tensor, y: torch.Tensor
) -> Callable[[], float]:
    per_stage = len(model) // run.size
    part = model[run.rank * per_stage : (run.rank + 1) * per_stage]
    stage = PipelineStage(part, run.rank, run.size, run.device)
    runner = TORCH[schedule](stage, micros, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), 0.01)
    last = run.rank == run.size - 1

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if run.rank == 0:
            runner.step(x)
        elif last:
            runner.step(target=y, losses=losses)
        else:
            runner.step()
        optimizer.step()
        return float(torch.stack(losses).mean().detach()) if last else 0.0

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("--width", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="in a micro-batch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--per-gpu", action="store_true", help="all workers on one GPU")
    parser.add_argument("--save", default="pipeline_vs_torch", metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    options = parser.parse_args()
    restart_on_workers(options.workers, per_gpu=options.per_gpu)
    run = fd.init(seed=0)
    assert dist.is_initialized(), "torch's side wants a default process group"
    rows: list[dict[str, Any]] = []
    for width in options.width:
        for schedule in TORCH:
            x = torch.randn(options.rows * options.microbatches, width, device=run.device)
            y = torch.randn_like(x)
            model = network(options.blocks, width).to(run.device)
            sides = {
                "ours": ours(run, copy.deepcopy(model), schedule, options.microbatches, x, y),
                "torch": torchs(run, copy.deepcopy(model), schedule, options.microbatches, x, y),
            }
            times: dict[str, list[float]] = {side: [] for side in sides}
            losses: dict[str, float] = {}
            for number in range(options.steps + 5):
                order = list(sides) if number % 2 else list(reversed(sides))
                for side in order:
                    run.group.barrier()
                    begin = time.perf_counter()
                    losses[side] = sides[side]()
                    if run.device.type == "cuda":
                        torch.cuda.synchronize()
                    run.group.barrier()
                    if number >= 5:
                        times[side].append(time.perf_counter() - begin)
            if run.rank == run.size - 1:
                assert abs(losses["ours"] - losses["torch"]) < 1e-4, losses
            ratio = statistics.median(
                a / b for a, b in zip(times["ours"], times["torch"], strict=True)
            )
            row = {
                "width": width,
                "schedule": schedule,
                "ours_ms": {k: 1e3 * v for k, v in spread(times["ours"]).items()},
                "torch_ms": {k: 1e3 * v for k, v in spread(times["torch"]).items()},
                "ratio": ratio,
            }
            rows.append(row)
            run.print(
                f"width {width:5} {schedule:6} ours {row['ours_ms']['median']:8.2f} ms  "
                f"torch {row['torch_ms']['median']:8.2f} ms  ratio {ratio:.3f}"
            )
    worst = max(row["ratio"] for row in rows)
    if run.rank == 0:
        result = {
            "workers": options.workers,
            "microbatches": options.microbatches,
            "rows_in_a_microbatch": options.rows,
            "rows": rows,
            "largest_ratio": worst,
        }
        save(options.save, result, options.out)
    run.print(f"largest ratio {worst:.3f} (target 1.0, {'met' if worst <= 1 else 'missed'})")


if __name__ == "__main__":
    main()
