"""Fails on some ranks, in the way that the first argument names, while the others wait for them."""

import os
import sys

import farandole as fd

how = sys.argv[1]
if how == "before" and os.environ["RANK"] == "1":
    import no_such_module  # noqa: F401

run = fd.init(timeout=60)
run.group.barrier()
if how == "raise" and run.rank == 1:
    raise ValueError("the first to fail")
if how == "exit" and run.rank == 1:
    sys.exit(3)
if how == "vanish" and run.rank == 1:
    os._exit(4)
if how == "several":
    if run.rank == 2:
        raise ValueError("the first to fail")
    try:
        run.group.barrier()
    except fd.CommError:
        raise RuntimeError("one that follows") from None
run.group.barrier()
