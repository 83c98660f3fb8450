"""Tensors as they travel: in a row, several at once, and described so that ranks can compare."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch

_FLAT_BYTES = 64 * 2**20  # tensors are broadcast in flat pieces of about this size


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in a row; the tensor's own memory when it lies in a row itself.

    A view whose numbers are those of its memory with another sign (`x.conj().imag`) does not.
    """
    signs_differ = tensor.is_neg() or tensor.is_conj()
    if tensor.stride() == (1,) and not (signs_differ or tensor.requires_grad):
        return tensor
    row = tensor.detach()
    if signs_differ or not row.is_contiguous():
        row = row.contiguous().resolve_neg().resolve_conj()
    return row.as_strided((row.numel(),), (1,))  # even a single element of a wider stride


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copies into a tensor that did not lie in a row; returns the tensor."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def claim_of(what: str, tensor: torch.Tensor, *details: str) -> str:
    return _claim_text(what, tensor.dtype, tensor.shape, details)


@functools.lru_cache(maxsize=1024)
def _claim_text(what: str, dtype: torch.dtype, shape: torch.Size, details: tuple[str, ...]) -> str:
    return f"{what}({kind_of(dtype)} {tuple(shape)}, {', '.join(details)})"


def kind_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same_kind in kinds.values():
        batch: list[torch.Tensor] = []
        batch_bytes = 0
        for tensor in same_kind:
            batch.append(tensor)
            batch_bytes += tensor.nbytes
            if batch_bytes >= _FLAT_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        if batch:
            yield batch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is neither inf nor NaN in it."""
    if math.isfinite(tensor.sum().item()):  # one of them would be in the sum too
        return True
    lowest, highest = torch.aminmax(tensor)  # but large numbers may have added up to inf
    return bool(torch.isfinite(lowest) & torch.isfinite(highest))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps or overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return expected == math.prod(tensor.shape)
