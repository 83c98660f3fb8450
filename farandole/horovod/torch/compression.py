"""What makes a gradient smaller before it travels, and as large as it was afterwards.

`Compression.fp16` and `Compression.bf16` send half as many bytes. Single precision keeps its range
as bfloat16, and three more bits of each number as float16.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class Compressor:
    """What users extend. `compress` comes first on every rank; the sum goes to `decompress`."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What is to travel, and whatever `decompress` needs to know besides."""
        raise NotImplementedError("a Compressor needs a static method compress(tensor).")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """What has travelled, in the dtype that `compress` was given."""
        raise NotImplementedError("a Compressor needs a static method decompress(tensor, ctx).")


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16. What is larger than 65,504 becomes infinite."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _narrowed(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return _widened(tensor, ctx)


class BF16Compressor(Compressor):
    """Floating-point tensors travel as bfloat16: the range of float32, three digits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return _narrowed(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return _widened(tensor, ctx)


class Compression:
    """The compressors by name, for `compression=` of the collectives and the optimizer."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor
    bf16: ClassVar[type[Compressor]] = BF16Compressor


def _narrowed(tensor: torch.Tensor, to: torch.dtype) -> tuple[torch.Tensor, torch.dtype | None]:
    """Numbers that are not wider stay as they are: nothing is saved, only digits or range lost."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize <= to.itemsize:
        return tensor, None
    return tensor.to(to), tensor.dtype


def _widened(tensor: torch.Tensor, original: torch.dtype | None) -> torch.Tensor:
    return tensor if original is None else tensor.to(original)
