"""Horovod's helpers, as far as scripts and their tests import them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

import torch.cuda

from farandole.horovod import built

EXTENSIONS = ("torch", "tensorflow", "keras")
"""The frameworks that Horovod may be built for; here they need no building, only installing."""

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether Horovod can be used with this framework."""
    found = ext_base_name in EXTENSIONS and find_spec(ext_base_name) is not None
    if verbose:
        print(f"Extension {ext_base_name} was {'' if found else 'NOT '}built.")
    return found


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this framework has a GPU to use."""
    del verbose
    return extension_available(ext_base_name) and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """As `hvd.mpi_built()`; and so the others. There is nothing to be told with `verbose`."""
    del verbose
    return built.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    del verbose
    return built.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    del verbose
    return built.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    del verbose
    return built.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    del verbose
    return built.ccl_built()


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Inside, these environment variables are set; None leaves one as it is."""
    chosen = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Pieces that are as even as they can be; the first ones are the longer ones."""
    each, over = divmod(len(values), parts)
    ends = [each * i + min(i, over) for i in range(parts + 1)]
    return [values[ends[i] : ends[i + 1]] for i in range(parts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True
