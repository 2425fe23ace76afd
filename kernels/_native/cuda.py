"""Compile-once loader for CUDA C++ sources, through the runtime compiler that torch ships; nothing but torch and the driver is needed.

A compiled kernel is cached under a hash of its sources, definitions, flags and the compiler's version, so that no other checkout's build
can be loaded. Importing this needs neither a card nor the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock

from rlk.kernels._native.build import NativeBuildError, cache_root
from rlk.kernels.dispatch import current, record
from rlk.kernels.overlap import overlaps

FLAGS = ("--gpu-architecture=sm_90a", "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""The driver's number of the attribute of a launch that overlaps the one before it."""
_MOST_SHARED_BYTES = 8
"""The driver's number of the attribute "dynamic shared memory, at most"."""

Argument = ctypes.Structure | ctypes.Array[ctypes.c_uint64]


class Element(NamedTuple):
    """An element type as the driver numbers it, and its bytes."""

    value: int
    size: int


BF16, FLOAT32 = Element(9, 2), Element(7, 4)


class CudaSource:
    """One operator's CUDA C++ source, compiled per set of definitions.

    ``kernel_id`` is ``cuda:<op>:<first 12 hex digits of the hash>``; the hash covers ``files`` (the source first) and the flags.
    """

    def __init__(self, op: str, *files: Path) -> None:
        self.op = op
        self.files = files

    @functools.cached_property
    def digest(self) -> str:
        sha = hashlib.sha256("|".join(FLAGS).encode())
        for path in (*self.files, Path(__file__)):
            sha.update(path.read_bytes())
        return sha.hexdigest()

    @property
    def kernel_id(self) -> str:
        return f"cuda:{self.op}:{self.digest[:12]}"

    def compiled(self, definitions: Mapping[str, int], headers: Mapping[str, str]) -> bytes:
        """The machine code for ``definitions``, with generated ``headers``, from the cache or the compiler."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        _checked_nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        options = [*FLAGS, *(f"-D{name}={value}" for name, value in definitions.items())]
        key = f"{self.digest} {major.value}.{minor.value} {options} {sorted(headers.items())}"
        target = cache_root() / f"{self.op}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"):
                if not target.exists():
                    partial = target.with_suffix(f".{os.getpid()}.tmp")
                    partial.write_bytes(_compile(self.files[0], options, headers))
                    partial.rename(target)
        return target.read_bytes()


class _Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: a number, and a value of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Configuration(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class CudaKernel:
    """One function of a compiled source, on one card. shared: bytes of dynamic shared memory; threads: per block."""

    def __init__(self, code: bytes, name: str, device: torch.device, threads: int, shared: int) -> None:
        self.threads, self.shared = threads, shared
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _hold_context()
            _checked("cuModuleLoadData", ctypes.byref(module), code)
        _checked("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _checked("cuFuncSetAttribute", self._function, _MOST_SHARED_BYTES, shared)

    def launch(self, blocks: int, arguments: Sequence[Argument], device: torch.device, *, waits: bool = False) -> None:
        """Run on torch's current stream; ``arguments`` as the kernel's parameters lie in memory.

        waits: the kernel itself waits before it touches what others write, and may be on the card early (``rlk.kernels.overlap``).
        """
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        with current(device):
            _hold_context()
            stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))  # as Triton asks for it
            if not (waits and overlaps()):
                _checked("cuLaunchKernel", self._function, blocks, 1, 1, self.threads, 1, 1, self.shared, stream, pointers, None)
                return
            overlap = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
            sizes = _Configuration(blocks, 1, 1, self.threads, 1, 1, self.shared, stream, ctypes.pointer(overlap), 1)
            _checked("cuLaunchKernelEx", ctypes.byref(sizes), self._function, pointers, None)


def tensor_maps(data: int, shape: tuple[int, int], stride: int, boxes: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """The copy engine's views of a bf16 matrix at ``data``, ``stride`` elements between rows, one after the other.

    One view per entry of ``boxes``: that many rows of 64 values at a time, swizzled over 128 bytes. What lies outside reads as +0. Address
    and rows must be 16-byte aligned.
    """
    words = 16
    room = (ctypes.c_uint64 * (words * len(boxes) + 8))()
    start = -ctypes.addressof(room) % 64
    for i, rows in enumerate(boxes):
        _encode(ctypes.byref(room, start + 8 * words * i), data, (shape[1], shape[0]), (stride,), (64, rows), BF16)
    return (ctypes.c_uint64 * (words * len(boxes))).from_buffer(room, start)


def tensor_map(
    data: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], element: Element = BF16
) -> ctypes.Array[ctypes.c_uint64]:
    """The copy engine's view of a tensor at ``data``, as of :func:`tensor_maps`: innermost dimension first.

    strides: elements between neighbours of every dimension but the innermost. box: what one copy takes, 128 bytes of the innermost.
    """
    room = (ctypes.c_uint64 * 24)()
    start = -ctypes.addressof(room) % 64
    _encode(ctypes.byref(room, start), data, sizes, strides, box, element)
    return (ctypes.c_uint64 * 16).from_buffer(room, start)


def _encode(view: object, data: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], element: Element) -> None:
    rank, no_interleave, swizzle_128, promote_256, zeros = len(sizes), 0, 3, 3, 0
    _checked(
        "cuTensorMapEncodeTiled", view, element.value, rank, ctypes.c_void_p(data), (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*(element.size * stride for stride in strides)), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1 for _ in box)), no_interleave, swizzle_128, promote_256, zeros,
    )  # fmt: skip


def ran(op: str, source: CudaSource) -> None:
    """Record ``op`` as run by ``source``, whose kernels stand in the table of the backend "triton" beside Triton's own."""
    record(op, "triton", source.kernel_id)


_THREAD = threading.local()


def _hold_context() -> None:
    """Give the calling thread the current card's context, once: the driver asks for one, and a thread of torch's backward pass whose
    tensors all come from the cache has made no call of the runtime that would bring it."""
    if hasattr(_THREAD, "held"):
        return
    context = ctypes.c_void_p()
    _checked("cuCtxGetCurrent", ctypes.byref(context))
    if not context:
        card = ctypes.c_int()
        _checked("cuDeviceGet", ctypes.byref(card), torch.cuda.current_device())
        _checked("cuDevicePrimaryCtxRetain", ctypes.byref(context), card)
        _checked("cuCtxSetCurrent", context)
    _THREAD.held = True


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(function: str, *arguments: object) -> None:
    error = getattr(_driver(), function)(*arguments)
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise RuntimeError(f"{function}: {(text.value or b'unknown error').decode()} ({error})")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    name = f"libnvrtc.so.{major}"
    beside = sorted(Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}"))
    try:
        return ctypes.CDLL(str(beside[0]) if beside else name)
    except OSError as error:
        raise NativeBuildError(f"no {name}: install torch's CUDA runtime compiler, the package nvidia-cuda-nvrtc") from error


def _checked_nvrtc(function: str, *arguments: object) -> None:
    error = getattr(_nvrtc(), function)(*arguments)
    if error:
        raise NativeBuildError(f"{function} failed with error {error}")


def _compile(source: Path, options: Sequence[str], headers: Mapping[str, str]) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
    _checked_nvrtc(
        "nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts, names
    )  # fmt: skip
    failed = _nvrtc().nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    if failed:
        _checked_nvrtc("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        _checked_nvrtc("nvrtcGetProgramLog", program, log)
        raise NativeBuildError(f"{source.name} does not compile: {log.value.decode().strip()[:2000]}")
    _checked_nvrtc("nvrtcGetCUBINSize", program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    _checked_nvrtc("nvrtcGetCUBIN", program, code)
    return code.raw
