"""Compressors: only wide floating-point numbers get narrower, and all come back as they were."""

from __future__ import annotations

import pytest
import torch

from farandole.horovod.torch.compression import (
    BF16Compressor,
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)

HALVES = [(Compression.fp16, torch.float16), (Compression.bf16, torch.bfloat16)]


def test_the_names() -> None:
    assert Compression.none is NoneCompressor
    assert Compression.fp16 is FP16Compressor
    assert Compression.bf16 is BF16Compressor
    for kind in (NoneCompressor, FP16Compressor, BF16Compressor):
        assert issubclass(kind, Compressor)


@pytest.mark.parametrize(("compressor", "narrow"), HALVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_travel_narrow(
    compressor: type[Compressor], narrow: torch.dtype, dtype: torch.dtype
) -> None:
    tensor = torch.tensor([[0.1, -3.0], [0.0, 1000.0]], dtype=dtype)
    small, ctx = compressor.compress(tensor)
    assert small.dtype is narrow
    back = compressor.decompress(small, ctx)
    assert back.dtype is dtype
    assert torch.equal(back, tensor.to(narrow).to(dtype))
    assert not torch.equal(back, tensor), "0.1 has lost digits"
    torch.testing.assert_close(back, tensor, rtol=2**-8, atol=0)


@pytest.mark.parametrize("compressor", [Compression.none, Compression.fp16, Compression.bf16])
@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float16, torch.bfloat16,
     torch.float8_e4m3fn],
)  # fmt: skip
def test_the_rest_travels_as_it_is(compressor: type[Compressor], dtype: torch.dtype) -> None:
    tensor = torch.ones(3).to(dtype)
    small, ctx = compressor.compress(tensor)
    assert small is tensor
    assert compressor.decompress(small, ctx) is tensor


def test_none_leaves_wide_numbers_alone() -> None:
    tensor = torch.tensor([0.1])
    small, ctx = Compression.none.compress(tensor)
    assert small is tensor
    assert Compression.none.decompress(small, ctx) is tensor


def test_range_is_what_bfloat16_keeps() -> None:
    huge = torch.tensor([1e30])
    assert Compression.fp16.decompress(*Compression.fp16.compress(huge)).isinf().all()
    assert Compression.bf16.decompress(*Compression.bf16.compress(huge)).isfinite().all()


def test_a_compressor_without_methods_says_what_it_lacks() -> None:
    class Mine(Compressor):
        pass

    with pytest.raises(NotImplementedError, match=r"compress\(tensor\)"):
        Mine.compress(torch.zeros(1))
    with pytest.raises(NotImplementedError, match=r"decompress\(tensor, ctx\)"):
        Mine.decompress(torch.zeros(1), None)
