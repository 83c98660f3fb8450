"""What makes a gradient smaller before it travels, and as large as it was afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

from farandole.horovod.tensorflow.framework import tf


class Compressor:
    """What users extend. `compress` comes first on every rank; the sum goes to `decompress`."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is to travel, and whatever `decompress` needs to know besides."""
        raise NotImplementedError("a Compressor needs a static method compress(tensor).")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """What has travelled, in the dtype that `compress` was given."""
        raise NotImplementedError("a Compressor needs a static method decompress(tensor, ctx).")


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16. What is larger than 65,504 becomes infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrowed(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Floating-point tensors travel as bfloat16: the range of float32, three digits."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return _narrowed(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressors by name, for `compression=` of the collectives and the optimizer."""

    none: ClassVar[type[Compressor]] = NoneCompressor
    fp16: ClassVar[type[Compressor]] = FP16Compressor
    bf16: ClassVar[type[Compressor]] = BF16Compressor


def _narrowed(tensor: Any, to: Any) -> tuple[Any, Any]:
    if not tensor.dtype.is_floating or tensor.dtype.size <= to.size:
        return tensor, None
    return tf.cast(tensor, to), tensor.dtype
