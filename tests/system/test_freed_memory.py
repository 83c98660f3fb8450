"""Memory that is kept: the same pages serve again, and the user's own settings count."""

from __future__ import annotations

import subprocess
import sys

import pytest

from farandole.system.freed_memory import keep_freed_memory

FAULTS = """
import resource, sys
from farandole.system.freed_memory import keep_freed_memory

def batches(count):
    for _ in range(count):
        batch = [bytearray(50_000) for _ in range(64)]
        for sample in batch:
            sample[::4096] = bytes(len(sample[::4096]))
        del batch, sample

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep" and not keep_freed_memory({}):
    sys.exit(3)
batches(5)
begin = faults()
batches(20)
print(faults() - begin)
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=False
    )
    if done.returncode == 3:
        pytest.skip("this C library cannot be told to keep memory")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_batches_get_the_pages_of_those_before() -> None:
    assert page_faults("keep") < 2000  # of 15,600 pages that 20 batches have


@pytest.mark.parametrize(
    "environ",
    [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}],
)
def test_what_the_user_has_set_counts(environ: dict[str, str]) -> None:
    assert not keep_freed_memory(environ)
