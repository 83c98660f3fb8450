"""Horovod's inner modules that scripts and tests import: helpers, and what is built."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress

import pytest
import torch

import farandole.horovod.torch as hvd
from farandole.horovod.common import util
from farandole.horovod.runner.util.threads import (
    execute_function_multithreaded,
    in_thread,
    on_event,
)
from farandole.serialization import sparse as sparse_tensors

PATIENCE_SECONDS = 150.0


def test_what_is_built() -> None:
    assert util.extension_available("torch")
    assert util.extension_available("torch", verbose=True)
    assert not util.extension_available("tensorflow")
    assert util.gpu_available("torch") == torch.cuda.is_available()
    for name in ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built"):
        assert getattr(util, name)() == getattr(util, name)(verbose=True) == getattr(hvd, name)()


def test_variables_are_set_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_KEPT", "before")
    monkeypatch.delenv("FD_NEW", raising=False)
    with suppress(KeyError), util.env(FD_KEPT="within", FD_NEW="new", FD_NONE=None):
        assert (os.environ["FD_KEPT"], os.environ["FD_NEW"]) == ("within", "new")
        assert "FD_NONE" not in os.environ
        raise KeyError
    assert os.environ["FD_KEPT"] == "before"
    assert "FD_NEW" not in os.environ


def test_small_helpers() -> None:
    assert util.split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
    assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.is_iterable("ab")
    assert not util.is_iterable(3)


def test_functions_in_threads() -> None:
    seen: list[int] = []
    in_thread(seen.append, (1,)).join(PATIENCE_SECONDS)
    in_thread(seen.index, (9,), silent=True).join(PATIENCE_SECONDS)
    assert seen == [1]
    with pytest.raises(ValueError, match="must be a tuple"):
        in_thread(seen.append, [1])
    assert execute_function_multithreaded(pow, [[2, 3], [3, 2]]) == {0: 8, 1: 9}
    assert execute_function_multithreaded(pow, []) == {}
    with pytest.raises(ZeroDivisionError):
        execute_function_multithreaded(divmod, [[1, 1], [1, 0]], max_concurrent_executions=1)
    done = threading.Event()
    assert execute_function_multithreaded(done.set, [[]], block_until_all_done=False) is None
    assert done.wait(PATIENCE_SECONDS)


def test_a_function_is_called_on_an_event_unless_stopped() -> None:
    event, stop = threading.Event(), threading.Event()
    seen: list[int] = []
    calls = on_event(event, seen.append, (1,))
    never = on_event(threading.Event(), seen.append, (2,), stop, check_stop_interval_s=0.01)
    stop.set()
    never.join(PATIENCE_SECONDS)
    assert not never.is_alive()
    event.set()
    calls.join(PATIENCE_SECONDS)
    assert seen == [1]


@pytest.mark.parametrize("enabled", [False, True])
def test_a_pytorch_that_warns_at_checked_tensors_is_told_once(
    monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    """2.11 and 2.12 do, until it has been said for the whole process; 2.13 hears the argument."""
    said: list[str] = []

    class Checks:
        @staticmethod
        def is_enabled() -> bool:
            return enabled

        @staticmethod
        def enable() -> None:
            said.append("enabled")

        @staticmethod
        def disable() -> None:
            said.append("disabled")

    real = torch.sparse_coo_tensor

    def warns(*args: object, **options: object) -> torch.Tensor:
        if not said:
            warnings.warn("Sparse invariant checks are implicitly disabled.", stacklevel=2)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.sparse, "check_sparse_tensor_invariants", Checks)
    monkeypatch.setattr(torch, "sparse_coo_tensor", warns)
    sparse_tensors.settle_checks()
    sparse_tensors.settle_checks()
    assert said == ["enabled" if enabled else "disabled"]
    found = sparse_tensors.checked_sparse(torch.tensor([[1]]), torch.ones(1), (2,))
    assert found.to_dense().tolist() == [0.0, 1.0]


def test_a_pytorch_that_hears_the_argument_is_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_tensors.settle_checks()
        with pytest.raises(RuntimeError):
            sparse_tensors.checked_sparse(torch.tensor([[5]]), torch.ones(1), (2,))
