"""Memory of a GPU that other processes can open, by the CUDA runtime that PyTorch has loaded.

PyTorch shares tensors between processes as well, and counts who uses them in a file. Processes that
end at the same time, as ranks do, cannot settle that count, and each prints a warning.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)


class GpuMemory:
    """Bytes on the current GPU: made here, or opened by the handle of the process that made them.

    They stay until the process ends: a peer may still be reading them.
    """

    def __init__(self, pointer: int, count: int, device: torch.device) -> None:
        self._pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
        self.tensor: torch.Tensor = torch.as_tensor(self, device=device)

    @classmethod
    def make(cls, count: int, device: torch.device) -> GpuMemory:
        """Raises `RuntimeError` where there is no room, or no CUDA runtime to be found."""
        pointer = ctypes.c_void_p()
        _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(count))
        return cls(_address(pointer), count, device)

    @classmethod
    def open(cls, handle: bytes, count: int, device: torch.device) -> GpuMemory:
        """Raises `RuntimeError` where processes may not open each other's memory."""
        pointer = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        _call(
            "cudaIpcOpenMemHandle", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        return cls(_address(pointer), count, device)

    def handle(self) -> bytes:
        handle = _Handle()
        _call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self._pointer))
        return bytes(handle)


def _address(pointer: ctypes.c_void_p) -> int:
    assert pointer.value is not None
    return pointer.value


def _call(name: str, *arguments: Any) -> None:
    if torch.version.cuda is None:
        raise RuntimeError("PyTorch was built without CUDA")
    name_of_library = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:
        library = ctypes.CDLL(name_of_library)
        function = getattr(library, name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{name_of_library}: {error}") from error
    code = function(*arguments)
    if code:
        # Taken from where CUDA keeps it, or PyTorch would find it there after its next kernel.
        library.cudaGetLastError()
        raise RuntimeError(f"{name} failed with CUDA error {code}")
