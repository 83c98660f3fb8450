"""What does a trace cost, and what does it cost not to want one?

The same model twice in the same processes, one followed by a recorder and one not, taking turns in
blocks of steps; writing the spans down counts. The median over blocks of the ratio of neighbouring
blocks is what counts. Target: at most 1.02. Without a trace no hook is installed; what is left is
one call that does nothing for every collective, and its nanoseconds are measured apart.

    python benchmarks/trace_overhead.py
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
import timeit
from pathlib import Path

import torch
import torch.nn.functional as F
from common import restart_on_workers, save, spread

import farandole as fd
from farandole.models import build
from farandole.trace.recorder import Recorder
from farandole.trace.spans import NO_TRACE, Trace

CASES = {
    "small_cnn": {"image_size": 28, "channels": 1, "batch": 64, "steps_per_block": 20},
    "resnet18": {"image_size": 32, "channels": 3, "batch": 8, "steps_per_block": 2},
}


def steps(
    model: torch.nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, count: int
) -> None:
    for _ in range(count):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


def measure(run: fd.Run, recorder: Recorder, name: str, blocks: int) -> dict[str, object]:
    case = CASES[name]
    torch.manual_seed(0)
    plain = build(name, classes=10, image_size=case["image_size"], channels=case["channels"])
    torch.manual_seed(1 + run.rank)
    x = torch.randn(case["batch"], case["channels"], case["image_size"], case["image_size"])
    y = torch.randint(10, (case["batch"],))
    traces: dict[str, Trace] = {"off": NO_TRACE, "on": recorder}
    sides = {}
    for side, trace in traces.items():
        run.group.trace = trace
        own = fd.Run(run.group, run.topology, run.device, settings=run.settings, name="trace")
        model = copy.deepcopy(plain)
        opt = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        sides[side] = own.distribute(model, opt)
        steps(*sides[side], x, y, 10)

    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for block in range(blocks):
        for side in ("off", "on") if block % 2 else ("on", "off"):
            run.group.trace = traces[side]
            run.group.barrier()
            begin = time.perf_counter()
            steps(*sides[side], x, y, case["steps_per_block"])
            if side == "on":
                recorder.flush()
            seconds[side].append((time.perf_counter() - begin) / case["steps_per_block"])
    run.group.trace = NO_TRACE
    ratios = [a / b for a, b in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "ratio": spread(ratios),
        "step_ms": {side: 1000 * spread(values)["median"] for side, values in seconds.items()},
        "blocks": blocks,
        **case,
    }


def span_ns(trace: Trace) -> float:
    """What a collective spends on telling a trace."""

    def tell() -> None:
        with trace.span("all_reduce", "comm", bytes=4096, algorithm="ring", by="shm"):
            pass

    def nothing() -> None:
        pass

    count = 20_000
    told, empty = (min(timeit.repeat(each, number=count, repeat=7)) for each in (tell, nothing))
    return 1e9 * (told - empty) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--result", default="trace_overhead", help="name of the result file")
    args = parser.parse_args()
    restart_on_workers(args.workers)
    run = fd.init()
    with tempfile.TemporaryDirectory() as folder:
        header = {"rank": run.rank, "size": run.size, "host": run.host, "pid": 0}
        recorder = Recorder(Path(folder) / "part.jsonl", header)
        results = {name: measure(run, recorder, name, args.blocks) for name in args.models}
        nanoseconds = {"off": span_ns(NO_TRACE), "on": span_ns(recorder)}
        recorder.close()
    if run.rank == 0:
        result = {"workers": run.size, "target_ratio": 1.02, "models": results}
        save(args.result, {**result, "span_ns": nanoseconds})
        for name, found in results.items():
            steps_ms = {side: round(ms, 2) for side, ms in found["step_ms"].items()}
            print(f"{name}: {steps_ms} ms a step")
        print(f"a span: {nanoseconds['on']:.0f} ns; not wanting one: {nanoseconds['off']:.0f} ns")
        for name, found in results.items():
            print(f"ratio {name} {found['ratio']['median']:.3f}")


if __name__ == "__main__":
    main()
