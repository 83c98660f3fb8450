"""Whether an error of PyTorch's process groups means a lost rank, or a fault of this one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farandole.comm.transports.c10d import C10d
from farandole.comm.transports.messages import PeerLost
from farandole.comm.transports.torch_errors import raise_lost

LIMIT = timedelta(seconds=7)


@pytest.mark.parametrize(
    ("error", "nccl", "said"),
    [
        (
            RuntimeError("[pair.cc:1] Connection closed. Ask"),
            False,
            r"hung up \(Connection closed\)",
        ),
        (RuntimeError("Timed out waiting 7000ms"), False, "did not answer within 7 s"),
        (
            dist.DistBackendError("communicator was aborted"),
            True,
            r"hung up \(communicator was abo",
        ),
        (dist.DistStoreError("wait timeout after 7000ms"), True, "did not answer within 7 s"),
    ],
)
def test_ranks_that_are_lost(error: RuntimeError, nccl: bool, said: str) -> None:
    with pytest.raises(PeerLost, match=f"rank 3 {said}") as raised:
        raise_lost([3], error, LIMIT, nccl=nccl)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "nccl"),
    [
        (torch.OutOfMemoryError("no room"), False),
        (torch.AcceleratorError("device-side assert triggered"), True),
        (RuntimeError("all_reduce does not support PRODUCT on complex tensors"), True),
    ],
)
def test_faults_of_this_rank(error: RuntimeError, nccl: bool) -> None:
    with pytest.raises(type(error)) as raised:
        raise_lost([3], error, LIMIT, nccl=nccl)
    assert raised.value is error


class OnGpu(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize(
    ("dtype", "op", "by_nccl", "by_gloo"),
    [
        (torch.float32, "product", True, True),
        (torch.bool, "max", True, False),
        (torch.int16, "sum", False, False),
        (torch.complex64, "sum", True, False),
        (torch.complex64, "product", False, False),
        (torch.float8_e5m2, "sum", False, False),
    ],
)
def test_what_a_backend_can_reduce(
    dtype: torch.dtype, op: str, by_nccl: bool, by_gloo: bool
) -> None:
    wire = C10d.__new__(C10d)
    tensor = torch.zeros(3).to(dtype)
    for wire._nccl, expected in ((True, by_nccl), (False, by_gloo)):
        assert wire.reduces_natively(tensor.as_subclass(OnGpu), op) is expected  # type: ignore[arg-type]
        assert wire.reduces_natively(tensor, op) is by_gloo  # type: ignore[arg-type]
