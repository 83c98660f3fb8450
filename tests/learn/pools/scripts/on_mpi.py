"""Sums on the processes of mpi4py.futures."""

from __future__ import annotations

from mpi4py.futures import MPIPoolExecutor

from tests.learn.pools.scripts.common import try_all

if __name__ == "__main__":
    with MPIPoolExecutor() as executor:
        try_all(executor, kill=False)
