"""What codecs save in bytes, what they cost in time, and what they do to accuracy.

For each codec and size: bytes sent against a raw all-reduce's (counted, not only stated), and time
against a raw all-reduce's in the same process group, taking turns. Where ranks share a host, bytes
are cheap and codecs lose; so there is also the rate of the link below which the codec would win,
which is the bytes saved over the time it takes longer. Then the accuracy on hand-written digits
after the same number of steps, with and without momentum.

    python benchmarks/codecs.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from common import restart_on_workers, save, spread
from sklearn.datasets import load_digits

import farandole as fd
from farandole.comm.codecs import CODECS, Codec, parse
from farandole.comm.meter import ring_bytes

KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, MIB, 16 * MIB)
# With momentum, a codec that sends little at a time needs a lower rate; this one is for all.
OPTIMIZERS = {"plain": (0.3, 0.0), "momentum": (0.03, 0.9)}


def measure(run: fd.Run, codec: Codec, size_bytes: int, repeats: int) -> dict[str, object]:
    wide = 1024 if size_bytes > 64 * KIB else 128
    shape = (size_bytes // 4 // wide, wide)
    generator = torch.Generator().manual_seed(run.rank)
    gradient = torch.randn(shape, generator=generator)
    compressor = codec.build()
    seconds: dict[str, list[float]] = {"raw": [], "codec": []}
    sent = 0
    for repeat in range(repeats + 1):
        for side in ("raw", "codec") if repeat % 2 else ("codec", "raw"):
            mine = gradient.clone()
            run.group.barrier()
            bytes_before, begin = run.group.meter.bytes_sent, time.perf_counter()
            if side == "raw":
                run.group.all_reduce(mine, "average")
            else:
                compressor.average({"gradient": mine}, run.group)
            took = time.perf_counter() - begin
            if side == "codec":
                sent = run.group.meter.bytes_sent - bytes_before
            if repeat:  # the first is for warming up
                seconds[side].append(took)
    ratios = [codec / raw for raw, codec in zip(seconds["raw"], seconds["codec"], strict=True)]
    medians = {side: spread(values)["median"] for side, values in seconds.items()}
    saved_bytes = ring_bytes(size_bytes, run.size) - sent
    longer = medians["codec"] - medians["raw"]
    return {
        "bytes": size_bytes,
        "times_smaller": ring_bytes(size_bytes, run.size) / sent,
        "times_smaller_stated": codec.times_smaller(shape, 4, run.size),
        "ratio": spread(ratios),
        "seconds": medians,
        "wins_below_gbit_per_second": 8 * saved_bytes / longer / 1e9 if longer > 0 else None,
    }


def accuracy(run: fd.Run, codec: str | None, rate: float, momentum: float, steps: int) -> float:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    wrapped, optimizer = run.distribute(model, optimizer, sync=fd.AllReduce(codec=codec))
    share = 64 // run.size
    for step in range(steps):
        begin = 64 * step + share * run.rank
        batch = train[torch.arange(begin, begin + share) % len(train)]
        optimizer.zero_grad()
        F.cross_entropy(wrapped(images[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(images[test]).argmax(dim=1) == labels[test]
    return right.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    restart_on_workers(args.workers)
    run = fd.init()
    rows = {
        name: [measure(run, parse(name), size_bytes, args.repeats) for size_bytes in SIZES]
        for name in CODECS
    }
    accuracies = {
        str(codec): {
            how: accuracy(run, codec, rate, momentum, args.steps)
            for how, (rate, momentum) in OPTIMIZERS.items()
        }
        for codec in (None, *CODECS)
    }
    if run.rank > 0:
        return
    save(
        "codecs",
        {
            "workers": run.size,
            "transport": run.group.transport.name,
            "repeats": args.repeats,
            "codecs": rows,
            "digits": {"steps": args.steps, "optimizers": OPTIMIZERS, "accuracy": accuracies},
        },
    )
    for name, sizes in rows.items():
        for row in sizes:
            wins = row["wins_below_gbit_per_second"]
            print(
                f"{name:9} {row['bytes'] // KIB:6} KiB: {row['times_smaller']:6.1f} times smaller, "
                f"{row['ratio']['median']:5.1f} times the time, wins "
                + (f"below {wins:.2f} Gbit/s" if wins else "here too")
            )
    for name, reached in accuracies.items():
        print(f"digits {name}: " + ", ".join(f"{how} {got:.3f}" for how, got in reached.items()))


if __name__ == "__main__":
    main()
