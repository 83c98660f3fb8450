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
        (dist.DistBackendError("unhandled cuda error, Cuda failure 2 'out of memory'"), True),
        (dist.DistBackendError("unhandled cuda error, Cuda failure 2 'out of memory'"), False),
        (dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected"), True),
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


class Coalescing:
    """A process group of NCCL that fails where it is told to."""

    def __init__(self, *, at_once: bool, together: bool, later: bool = False) -> None:
        self._at_once, self._together, self._later = at_once, together, later
        self.is_open = False

    def _start_coalescing(self, device: torch.device) -> None:
        self.is_open = True

    def _end_coalescing(self, device: torch.device) -> Coalescing:
        self.is_open = False
        if self._together:
            raise dist.DistBackendError("ncclRemoteError: connection closed by the other side")
        return self

    def send(self, tensors: object, peer: int, tag: int) -> None:
        if self._at_once:
            raise dist.DistBackendError("the store was closed")

    recv = send

    def wait(self) -> None:
        if self._later:
            raise dist.DistBackendError("communicator was aborted")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ({"at_once": False, "together": True}, r"rank 1, 2 hung up \(ncclRemoteError"),
        # What comes at the end of a group that has failed is not what has happened.
        ({"at_once": True, "together": True}, r"rank 1 hung up \(the store was closed"),
        ({"at_once": False, "together": False, "later": True}, r"hung up \(communicator was abo"),
    ],
)
def test_messages_between_gpus(fails: dict[str, bool], said: str) -> None:
    wire = C10d.__new__(C10d)
    wire._process_group = group = Coalescing(**fails)  # type: ignore[assignment]
    wire._nccl, wire._tag, wire.timeout = True, 0, LIMIT
    there = torch.zeros(3, dtype=torch.uint8).as_subclass(OnGpu)
    with pytest.raises(PeerLost, match=said.replace("rank 1, 2", "ranks? 1.*2")):
        wire._exchange_on_gpu([(2, there)], [(1, there)])
    assert not group.is_open
