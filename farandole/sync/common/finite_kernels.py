"""One kernel over all gradients of one GPU: which are not finite, and zeros if any is not.

    gradients    │ g₀          │ g₁ │ g₂                    │ …     anywhere in the GPU's memory
    blocks       │ 0 │ 1 │ 2   │ 3  │ 4 │ 5 │ 6 │ 7         │ …     one program of the kernel each
                                            ╰── the last to end clears all, if one was bad

PyTorch has the same in pieces that return a tensor for each gradient or want one: for the 161
gradients of a ResNet-50 that took 2 ms of the host's time in every step. Here the host hands over a
list of addresses, and only when they have changed, and the kernel writes its answers into memory of
the host: in nearly all steps it has none to write, and nothing need be set to zero or copied.

Imported where there is a GPU alone: PyTorch brings Triton along for those.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from farandole.comm.tensors import is_dense
from farandole.sync.common.kinds import Kinds

_keep_for_ever = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))
_BLOCK = 8192
_WARPS = 8
_KINDS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _find_and_clear(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    owners,
    begins,
    state,
    answers,
    count,
    blocks,
    KIND: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Where a number is not finite: 1 in `answers`, for its gradient and behind the last.

    `state`: whether one is bad, and how many blocks have ended.
    """
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    numbers = tl.load(addresses + owner).to(tl.pointer_type(KIND))
    at = tl.load(begins + block) + tl.arange(0, BLOCK)
    values = tl.load(numbers + at, mask=at < tl.load(sizes + owner), other=0.0)
    if tl.float64 != KIND:
        values = values.to(tl.float32)
    sound = tl.abs(values) < float("inf")  # a NaN is not, either
    if tl.min(sound.to(tl.int32), axis=0) == 0:
        tl.store(answers + owner, 1)
        tl.store(answers + count, 1)
        tl.atomic_max(state, 1)
    # Each block writes what it found before it counts itself, and the last one reads after that.
    if tl.atomic_add(state + 1, 1) == blocks - 1:
        tl.atomic_xchg(state + 1, 0)  # for the next step
        if tl.atomic_max(state, 0) != 0:
            zeros = tl.zeros((BLOCK,), dtype=KIND)
            for other in range(blocks):
                owner = tl.load(owners + other)
                numbers = tl.load(addresses + owner).to(tl.pointer_type(KIND))
                at = tl.load(begins + other) + tl.arange(0, BLOCK)
                tl.store(numbers + at, zeros, mask=at < tl.load(sizes + owner))


class FiniteKernels:
    """Remembers from step to step where the gradients are and how they are cut into blocks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shapes: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        self._kinds: Kinds | None = None
        self._kind: object = None
        self._where: list[int] = []
        self._launch: Callable[[], None] | None = None

    def find_and_clear(
        self, gradients: Sequence[torch.Tensor], kinds: Kinds | None = None
    ) -> np.ndarray | None:
        """For each 0 or, if it is not finite, 1; then all are zeros, and behind the last is a 1.

        In memory of the host, where it stands when the GPU has come so far. It must be read before
        the next call. None, and nothing done, if they are of several dtypes or have gaps in their
        memory. Those of the same `kinds` as the last ones, the same object, are cut into the same
        blocks.
        """
        if kinds is None or kinds is not self._kinds:
            shapes = [(each.shape, each.stride(), each.dtype) for each in gradients]
            if shapes != self._shapes:
                self._cut(gradients)
                self._shapes = shapes
            self._kinds = kinds
        if self._kind is None:
            return None
        where = list(map(torch.Tensor.data_ptr, gradients))
        if where != self._where:  # the allocator mostly gives the same memory in every step
            # Over the last ones: the kernel has read them, since its answers have been read.
            self._addresses.copy_(_pinned(where), non_blocking=True)
            self._where = where
        if self._found[-1]:
            self._begin_anew()
        with torch.cuda.device(self._device):
            if self._launch is None:
                self._launch = self._launch_first()
            else:
                self._launch()
        return self._found

    def _launch_first(self) -> Callable[[], None] | None:
        """Returns what does the same again, without what Triton works out from the arguments."""
        # That is much Python, which has left the processor's caches when a step has gone by.
        grid = (self._blocks, 1, 1)
        arguments = (
            self._addresses,
            self._sizes,
            self._owners,
            self._begins,
            self._state,
            self._answers,
            self._count,
            self._blocks,
            self._kind,
            _BLOCK,
        )
        kernel = _find_and_clear[grid](*arguments, num_warps=_WARPS)
        # None where Triton interprets the kernel, and something else where it compiles it beside.
        return partial(kernel[grid], *arguments) if hasattr(kernel, "__getitem__") else None

    def _cut(self, gradients: Sequence[torch.Tensor]) -> None:
        dtypes = {gradient.dtype for gradient in gradients}
        serves = len(dtypes) == 1 and all(map(is_dense, gradients))
        self._kind = _KINDS.get(dtypes.pop()) if serves else None
        self._where = []
        if self._kind is None:
            return
        sizes = [gradient.numel() for gradient in gradients]
        blocks = [(at, begin) for at, size in enumerate(sizes) for begin in range(0, size, _BLOCK)]
        self._blocks = len(blocks)
        self._sizes = self._numbers(sizes)
        self._owners = self._numbers([owner for owner, _ in blocks])
        self._begins = self._numbers([begin for _, begin in blocks])
        self._addresses = torch.empty_like(self._sizes)
        self._count = len(sizes)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """None is bad yet. In other memory: somebody may still read what was found before."""
        self._state = torch.zeros(2, dtype=torch.int32, device=self._device)
        self._answers = torch.zeros(self._count + 1, dtype=torch.int32, pin_memory=True)
        # Never given back: when this object goes, the kernel may still be about to write there. To
        # wait for it could take for ever, where it stands behind a rank that is lost.
        _keep_for_ever(self._answers)
        self._found = self._answers.numpy()
        self._launch = None

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return _pinned(values).to(self._device, non_blocking=True)


def _pinned(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).pin_memory()


def serving(device: torch.device) -> FiniteKernels | None:
    """Kernels that were tried on `device`. None where they cannot be built: that takes a compiler
    for C."""
    kernels = FiniteKernels(device)
    sound = torch.ones(2, 2, device=device)
    ill = torch.tensor([[1.0, torch.nan], [1.0, 1.0]], device=device)
    try:
        is_right = _find(kernels, sound) == [0, 0, 0]
        is_right &= _find(kernels, ill) == [1, 0, 1]  # launched in another way than the first
    except Exception:  # of many kinds, from Triton and from what it calls
        return None
    return FiniteKernels(device) if is_right and sound.all() and not ill.any() else None


def _find(kernels: FiniteKernels, gradients: torch.Tensor) -> list[int] | None:
    found = kernels.find_and_clear(gradients.unbind())
    torch.cuda.current_stream(gradients.device).synchronize()
    return None if found is None else found.tolist()
