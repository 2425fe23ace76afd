"""Runs parts of ``small_shapes.py`` on memory in which every tensor has pages of its own and ends, or starts, where no page is mapped:

    PYTHONPATH=. python3 tests/gpu/guard_pages.py end [part ...]
    PYTHONPATH=. python3 tests/gpu/guard_pages.py start [part ...]

A kernel that reads or writes past that edge, the copy engine included, ends in "illegal memory access", whatever tools can follow its
code. "end" leaves at most 15 bytes behind a tensor, since operands are 16-byte aligned; fresh memory is NaN. Names of ``faulty_kernels.py``
are parts too.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

ALIGNMENT = 16
_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp of the driver's header."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("type", "handles")), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


def _driver(function: str, *arguments: object) -> None:
    """Ends the process on an error: an exception does not leave a function that torch calls."""
    error = getattr(ctypes.CDLL("libcuda.so.1"), function)(*arguments)
    if error:
        print(f"{function} failed with error {error}", file=sys.stderr, flush=True)
        os._exit(1)


class GuardedMemory:
    """torch's memory on the card, each tensor between unmapped pages; nothing is given back. ``edge``: "end" or "start"."""

    def __init__(self, edge: str) -> None:
        self.edge, self.tensors = edge, 0
        allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self._functions = allocate(self._allocate), release(lambda *_: None)
        allocate_at, release_at = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in self._functions)
        allocator = torch.cuda.memory._CUDAAllocator(torch._C._cuda_customAllocator(allocate_at, release_at))
        torch.cuda.memory.change_current_allocator(allocator)

    def _allocate(self, size: int, device: int, _: int) -> int:
        asked = _Properties(type=_PINNED, location=_Location(_DEVICE, device))
        page, handle, base, context = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p()
        _driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _driver("cuCtxSetCurrent", context)  # the threads of a backward pass have none yet
        _driver("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(asked), 0)
        room, nowhere, zero = ctypes.c_size_t(-(-max(size, 1) // page.value) * page.value), ctypes.c_uint64(0), ctypes.c_size_t(0)
        _driver("cuMemAddressReserve", ctypes.byref(base), ctypes.c_size_t(room.value + 2 * page.value), zero, nowhere, nowhere)
        first = ctypes.c_uint64(base.value + page.value)
        _driver("cuMemCreate", ctypes.byref(handle), room, ctypes.byref(asked), nowhere)
        _driver("cuMemMap", first, room, zero, handle, nowhere)
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        _driver("cuMemSetAccess", first, room, ctypes.byref(access), ctypes.c_size_t(1))
        _driver("cuMemsetD8_v2", first, ctypes.c_ubyte(0xFF), room)
        self.tensors += 1
        return first.value + (room.value - -(-size // ALIGNMENT) * ALIGNMENT if self.edge == "end" else 0)


def main() -> None:
    edge, *parts = sys.argv[1:]
    memory = GuardedMemory(edge)
    from faulty_kernels import SOURCES, run
    from small_shapes import PARTS, kernels

    for name in parts or PARTS:
        run(name) if name in SOURCES else PARTS[name]()
        torch.cuda.synchronize()
        print(f"{name} ran", flush=True)
    print(kernels(), f"{memory.tensors} tensors", sep="\n", flush=True)
    os._exit(0)  # the allocator's functions end with the interpreter, its tensors after it


if __name__ == "__main__":
    main()
