"""How long until a script runs, against torchrun; and what `import farandole` adds to torch.

Both launchers start the same empty script on two workers, taking turns. Targets: at most 1.2 times
torchrun, and at most 0.3 s on top of `import torch`.

    python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import save, spread

IMPORT = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def timed(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def import_seconds(statement: str) -> float:
    code = f"import torch; {IMPORT.format(statement)}"
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"torchrun": [], "farandole": []}
    imports: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.write_text("")
        commands = {
            "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            "farandole": ["-m", "farandole", "run", "-n", "2"],
        }
        for _ in range(args.repeats):
            for side, command in commands.items():
                seconds[side].append(timed([sys.executable, *command, str(empty)]))
            # The name is touched, because farandole imports its rooms when they are first used.
            imports.append(import_seconds("import farandole; farandole.init"))
    ratios = [a / b for a, b in zip(seconds["farandole"], seconds["torchrun"], strict=True)]
    save(
        "startup",
        {
            "target_ratio": 1.2,
            "ratio": spread(ratios),
            "seconds": {side: spread(values) for side, values in seconds.items()},
            "import_seconds_on_top_of_torch": spread(imports),
            "target_import_seconds": 0.3,
            "repeats": args.repeats,
        },
    )
    print(f"import farandole (and fd.init) adds {spread(imports)['median']:.3f} s to import torch")
    print(f"ratio {spread(ratios)['median']:.3f}")


if __name__ == "__main__":
    main()
