"""Fails on some ranks, in the way that the first argument names, while the others wait for them."""

import atexit
import contextlib
import os
import socket
import sys
import time
from pathlib import Path

import farandole as fd

how = sys.argv[1]
if how == "before" and os.environ["RANK"] == "1":
    import no_such_module  # noqa: F401


def hang_up_and_linger() -> None:
    """Ends as on a slow machine: the peers notice long before this process is gone."""
    for descriptor in (int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()  # not one that only listens
            connection.shutdown(socket.SHUT_RDWR)
    time.sleep(3)


if how == "linger" and os.environ["RANK"] == "1":
    atexit.register(hang_up_and_linger)  # after fd has left: last registered, first called

run = fd.init(timeout=150)
run.group.barrier()
if how in ("exit", "linger") and run.rank == 1:
    sys.exit(3)
if how == "vanish" and run.rank == 1:
    os._exit(4)
if how == "raise" and run.rank == 2:
    raise ValueError("the first to fail")
if how == "raise" and run.rank == 1:
    try:
        run.group.barrier()
    except fd.CommError:
        raise RuntimeError("one that follows") from None
run.group.barrier()
