"""Samples a second of shuffled, decoded batches: `fd.data.shards` against other ways to load.

The same samples, JPEG images and arrays, are written in the format of each side: single files for a
plain DataLoader, tars for Farandole and WebDataset, MDS shards for MosaicML Streaming, chunks for
LitData. Every side decodes with the same function, in two loading processes, with the same batches.
Each measurement is one whole epoch in a process of its own, after one that warms the file cache;
opening the data (reading indices, starting `fd.init`) is measured apart. Sides take turns. Packages
that cannot be imported are listed in the result. Target: at least 1.0 of the best other side.

    python benchmarks/data.py
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save, spread
from torch.utils.data import DataLoader, Dataset

KINDS = ("jpeg", "array")
SIDES = {"farandole": "farandole", "files": "torch", "webdataset": "webdataset",
         "streaming": "streaming", "litdata": "litdata"}  # fmt: skip
PROCESSES, BATCH = 2, 64
ARRAY_SHAPE = (3, 64, 64)


def encoded(kind: str, number: int) -> bytes:
    generator = np.random.default_rng(number)
    if kind == "array":
        return generator.random(ARRAY_SHAPE, dtype=np.float32).tobytes()
    from PIL import Image

    coarse = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(coarse).resize((128, 128)).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def decoded(kind: str, data: bytes) -> torch.Tensor:
    """What every side does with the bytes of a sample."""
    if kind == "array":
        return torch.from_numpy(np.frombuffer(data, np.float32).reshape(ARRAY_SHAPE).copy())
    from PIL import Image

    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(data))).copy())


# How each side's data are written


def write_files(samples: Iterable[tuple[int, bytes]], folder: Path) -> None:
    for number, data in samples:
        (folder / f"{number:06d}.bin").write_bytes(data)


def write_tars(samples: Iterable[tuple[int, bytes]], folder: Path, each: int = 500) -> None:
    rest = iter(samples)
    while shard := list(islice(rest, each)):
        with tarfile.open(folder / f"{shard[0][0]:06d}.tar", "w") as file:
            for number, data in shard:
                for suffix, content in (("bin", data), ("cls", str(number).encode())):
                    info = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))


def write_mds(samples: Iterable[tuple[int, bytes]], folder: Path) -> None:
    from streaming import MDSWriter

    columns = {"x": "bytes", "y": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 23) as out:
        for number, data in samples:
            out.write({"x": data, "y": number})


def _litdata_sample(path: str) -> dict[str, Any]:
    return {"x": Path(path).read_bytes(), "y": int(Path(path).stem)}


def write_litdata(samples: Iterable[tuple[int, bytes]], folder: Path) -> None:
    from litdata import optimize

    with tempfile.TemporaryDirectory() as place:
        write_files(samples, Path(place))
        names = sorted(map(str, Path(place).iterdir()))
        optimize(_litdata_sample, names, str(folder), num_workers=1, chunk_bytes="8MB")


WRITERS: dict[str, Callable[[Iterable[tuple[int, bytes]], Path], None]] = {
    "files": write_files,
    "tars": write_tars,
    "streaming": write_mds,
    "litdata": write_litdata,
}
FOLDERS = {"farandole": "tars", "webdataset": "tars"}  # of the others: their own


# How each side reads them


class Files(Dataset[Any]):
    def __init__(self, folder: Path, kind: str) -> None:
        self.names = sorted(folder.iterdir())
        self.kind = kind

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        name = self.names[index]
        return decoded(self.kind, name.read_bytes()), int(name.stem)


def _of_tar(kind: str, sample: Any) -> Any:
    return decoded(kind, sample["bin"]), int(sample["cls"])


def _of_columns(kind: str, sample: Any) -> Any:
    return decoded(kind, sample["x"]), sample["y"]


def read_farandole(folder: Path, kind: str) -> Iterable[Any]:
    import farandole as fd

    dataset = fd.data.shards(str(folder / "*.tar"), transform=partial(_of_tar, kind))
    run = fd.init()
    return run.loader(dataset, batch_size=BATCH, num_workers=PROCESSES)


def read_files(folder: Path, kind: str) -> Iterable[Any]:
    return DataLoader(Files(folder, kind), BATCH, shuffle=True, num_workers=PROCESSES)


def read_webdataset(folder: Path, kind: str) -> Iterable[Any]:
    import webdataset as wds

    dataset = (
        wds.WebDataset(sorted(map(str, folder.iterdir())), shardshuffle=100)
        .shuffle(1000)
        .map(partial(_of_tar, kind))
    )
    return DataLoader(dataset, BATCH, num_workers=PROCESSES)


def read_streaming(folder: Path, kind: str) -> Iterable[Any]:
    from streaming import StreamingDataset

    class Decoding(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return _of_columns(kind, super().__getitem__(at))

    dataset = Decoding(local=str(folder), shuffle=True, batch_size=BATCH)
    return DataLoader(dataset, BATCH, num_workers=PROCESSES)


def read_litdata(folder: Path, kind: str) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    class Decoding(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return _of_columns(kind, super().__getitem__(at))

    dataset = Decoding(str(folder), shuffle=True)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=PROCESSES)


READERS: dict[str, Callable[[Path, str], Iterable[Any]]] = {
    "farandole": read_farandole,
    "files": read_files,
    "webdataset": read_webdataset,
    "streaming": read_streaming,
    "litdata": read_litdata,
}


def measure_here(side: str, folder: Path, kind: str) -> None:
    """One epoch in this process; prints its samples a second, and what opening the data took."""
    torch.set_num_threads(1)
    random.seed(0)
    importlib.import_module(SIDES[side])
    began = time.perf_counter()
    loader = READERS[side](folder, kind)
    opened = time.perf_counter()
    numbers: list[int] = []
    for _, labels in loader:
        numbers += labels.tolist()
    seconds = time.perf_counter() - opened
    found = {
        "rate": len(numbers) / seconds,
        "opening_seconds": opened - began,
        "samples": len(set(numbers)),
    }
    print(json.dumps(found))


def measured(side: str, folder: Path, kind: str) -> dict[str, Any]:
    words = ["--here", side, "--folder", str(folder), "--kind", kind]
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{side}, {kind}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare(kind: str, sides: list[str], count: int, repeats: int, place: Path) -> dict[str, Any]:
    def samples() -> Iterator[tuple[int, bytes]]:
        return ((number, encoded(kind, number)) for number in range(count))

    folders = {side: place / kind / FOLDERS.get(side, side) for side in sides}
    for folder in dict.fromkeys(folders.values()):
        folder.mkdir(parents=True)
        WRITERS[folder.name](samples(), folder)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    seen: dict[str, int] = {}
    opening: dict[str, float] = {}
    for turn in range(repeats + 1):
        for side in sides if turn % 2 else sides[::-1]:
            found = measured(side, folders[side], kind)
            seen[side], opening[side] = found["samples"], found["opening_seconds"]
            if turn:  # the first one warms the cache
                rates[side].append(found["rate"])
    assert seen["farandole"] == count
    medians = {side: float(np.median(rates[side])) for side in sides}
    others = {side: rate for side, rate in medians.items() if side != "farandole"}
    best = max(others, key=lambda side: others[side])
    for side in sides:
        print(f"{kind:6} {side:11} {medians[side]:9.0f} samples/s  ({seen[side]} of {count} seen)")
    ratio = medians["farandole"] / medians[best]
    print(f"{kind:6} ours / {best}: {ratio:.2f}")
    return {
        "samples_per_second": {side: spread(rates[side]) for side in sides},
        "samples_seen": seen,
        "opening_seconds": opening,
        "best_other": best,
        "ratio": ratio,
    }


def why_missing(side: str) -> str | None:
    try:
        importlib.import_module(SIDES[side])
    except Exception as error:  # packages fail to import in many ways
        print(f"{side} cannot be imported: {error}")
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--here", choices=SIDES, help="measure one epoch in this process")
    parser.add_argument("--results", type=Path, help="where to write the result")
    asked = parser.parse_args()
    if asked.here:
        measure_here(asked.here, asked.folder, asked.kind)
        return
    missing = {side: why for side in SIDES if (why := why_missing(side)) is not None}
    sides = [side for side in SIDES if side not in missing]
    with tempfile.TemporaryDirectory(dir=asked.folder) as place:
        kinds = {
            kind: compare(kind, sides, asked.samples, asked.repeats, Path(place))
            for kind in ([asked.kind] if asked.kind else KINDS)
        }
    result = {
        "what": "samples a second of shuffled, decoded batches, in two loading processes",
        "samples": asked.samples,
        "batch": BATCH,
        "processes": PROCESSES,
        "cores": len(os.sched_getaffinity(0)),
        "not_installed": missing,
        "target": 1.0,
        "kinds": kinds,
    }
    save("data", result, *([asked.results] if asked.results else []))
    print(
        f"ratio to the best other side, the lowest: {min(k['ratio'] for k in kinds.values()):.2f}"
    )


if __name__ == "__main__":
    main()
