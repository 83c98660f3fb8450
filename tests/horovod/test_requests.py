"""What a rank asks for, as a value."""

from __future__ import annotations

import json

import pytest
import torch

from farandole.comm.tensors import kind_of
from farandole.horovod.engine.requests import ALLREDUCE, ALLTOALL, BROADCAST, Request, dtype_bytes


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
)
def test_the_width_of_a_dtype(dtype: torch.dtype) -> None:
    assert dtype_bytes(kind_of(dtype)) == dtype.itemsize


def test_bytes_of_several_tensors() -> None:
    request = Request("x", ALLREDUCE, ("float32", "bool", "int64"), ((2, 3), (5,), ()))
    assert request.nbytes == 24 + 5 + 8
    assert Request("x", ALLREDUCE).nbytes == 0


def test_through_json_and_back() -> None:
    request = Request(
        "x", ALLTOALL, ("float32",), ((2, 3),), "", 1, 0.1, 1 / 3, "cuda", splits=(1, 1)
    )
    assert Request.read(json.loads(json.dumps(request))) == request
    assert hash(Request.read(json.loads(json.dumps(request)))) == hash(request)


def test_its_text_has_what_was_asked_for() -> None:
    request = Request("x", ALLREDUCE, ("float32",), ((2, 3),), "sum", prescale=0.5)
    assert str(request) == "allreduce(float32 (2, 3), op sum, scaled by 0.5 before and 1 after)"
    request = Request("x", BROADCAST, ("int8",) * 4, ((1,),) * 4, root=2, device="cuda")
    assert str(request) == "broadcast(int8 (1,), int8 (1,), int8 (1,), …, root rank 2, on cuda)"
    assert str(Request("x", "barrier")) == "barrier()"
