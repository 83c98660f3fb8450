"""Which GPUs a job may use: all of this host's, or those in CUDA_VISIBLE_DEVICES.

CUDA itself ignores everything behind the first entry that it does not understand, and a job would
run on fewer GPUs than its user thinks. Here such a list is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farandole.errors import UserError
from farandole.launch.gpu.nvidia_smi import Gpu

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_BY_BUS = "PCI_BUS_ID"


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Those that CUDA shows to a process, in CUDA's order. Raises `UserError`."""
    if not gpus:
        raise UserError("this host has no NVIDIA GPU. Leave --per-gpu out to run on its CPUs.")
    said = environ.get(VARIABLE)
    if said is None:
        return list(gpus)
    words = [word.strip() for word in said.split(",")]
    if words == [""] or words[0] == "-1":
        raise UserError(
            f"{VARIABLE}={said!r} hides all {len(gpus)} GPUs of this host. Unset it, or name "
            f"those to use, as in {VARIABLE}=0."
        )
    found = [_gpu(word, said, gpus, environ) for word in words]
    for gpu in found:
        if found.count(gpu) > 1:
            raise UserError(
                f"{VARIABLE}={said!r} has {gpu} twice, and CUDA refuses that. Name each GPU once: "
                "--per-gpu says how many workers share it."
            )
    return found


def count_visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> int:
    """How many GPUs a client of another's MPS daemon has. Raises `UserError`.

    Its own list counts GPUs of the daemon, which has a list too, and an order. So what a number
    stands for is not known here; but there are no more of them than the host has GPUs.
    """
    return len(visible_gpus(gpus, {**environ, _ORDER: _BY_BUS}))


def _gpu(word: str, said: str, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Gpu:
    if word.startswith("MIG-"):
        raise UserError(
            f"{VARIABLE}={said!r}: --per-gpu is not there for parts of a GPU (MIG), which have one "
            "MPS daemon each. Name whole GPUs, or leave --per-gpu out."
        )
    if word.startswith("GPU-"):
        fitting = [gpu for gpu in gpus if gpu.uuid.lower().startswith(word.lower())]
        if len(fitting) == 1:
            return fitting[0]
        which = "no GPU of this host" if not fitting else f"{len(fitting)} GPUs"
        raise UserError(f"{VARIABLE}={said!r}: {word} is {which}. `nvidia-smi -L` lists them.")
    if not word.isdecimal():
        raise UserError(
            f"{VARIABLE}={said!r}: {word!r} is neither the number of a GPU nor GPU-<UUID>. Write "
            f"numbers, as in {VARIABLE}=0,1."
        )
    if int(word) >= len(gpus):
        raise UserError(
            f"{VARIABLE}={said!r}: there is no GPU {word}; this host has {len(gpus)}, from 0 to "
            f"{len(gpus) - 1}."
        )
    if len({gpu.name for gpu in gpus}) > 1 and environ.get(_ORDER) != _BY_BUS:
        names = ", ".join(map(str, gpus))
        raise UserError(
            f"{VARIABLE}={said!r}: the GPUs of this host differ ({names}), and CUDA counts the "
            f"fastest first, nvidia-smi by the bus. Set {_ORDER}={_BY_BUS}, or name them by UUID."
        )
    return gpus[int(word)]
