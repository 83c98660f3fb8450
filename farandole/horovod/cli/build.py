"""What is here, as `horovodrun --check-build` shows it."""

from __future__ import annotations

import shutil

import farandole
from farandole.horovod import __version__


def show_build() -> str:
    from torch import distributed

    here = {
        "Frameworks": {"TensorFlow": False, "PyTorch": True, "MXNet": False},
        "Controllers": {
            "MPI": shutil.which("mpirun") is not None,
            "Gloo": distributed.is_gloo_available(),
        },
        "Tensor Operations": {
            "NCCL": distributed.is_nccl_available(),
            "DDL": False,
            "CCL": False,
            "MPI": False,  # mpirun starts the workers; their tensors travel as they do elsewhere
            "Gloo": distributed.is_gloo_available(),
            "Shared memory": True,
        },
    }
    lines = [f"Horovod v{__version__}, as Farandole v{farandole.__version__} has it:"]
    for title, found in here.items():
        lines += ["", f"Available {title}:"]
        lines += [f"    [{'X' if there else ' '}] {name}" for name, there in found.items()]
    return "\n".join(lines)
