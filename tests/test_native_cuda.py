"""How compiled CUDA C++ is launched, against a driver that only writes down what it is asked."""

import ctypes
import threading
from contextlib import nullcontext
from typing import TypeAlias

import pytest
import torch

from rlk.kernels._native import cuda

Reference: TypeAlias = "ctypes._CArgObject"
"""What ``ctypes.byref`` gives."""


class Driver:
    """Knows which threads have a context; every call succeeds."""

    def __init__(self) -> None:
        self.thread = threading.local()

    @property
    def context(self) -> int:
        """The calling thread's, 0 for none."""
        return getattr(self.thread, "context", 0)

    def cuCtxGetCurrent(self, context: Reference) -> int:
        self._write(context, self.context)
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Reference, card: ctypes.c_int) -> int:
        self._write(context, 100 + card.value)
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        self.thread.context = context.value or 0
        return 0

    def cuDeviceGet(self, card: Reference, index: int) -> int:
        ctypes.cast(card, ctypes.POINTER(ctypes.c_int))[0] = index
        return 0

    def cuModuleLoadData(self, module: object, code: bytes) -> int:
        """As the driver, which knows a module only in a context: CUDA_ERROR_INVALID_CONTEXT is 201."""
        return 0 if self.context else 201

    def cuModuleGetFunction(self, *_: object) -> int:
        return 0

    def cuFuncSetAttribute(self, *_: object) -> int:
        return 0

    def cuGetErrorString(self, *_: object) -> int:
        return 0

    @staticmethod
    def _write(where: Reference, value: int) -> None:
        ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))[0] = value or None


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(cuda, "_driver", lambda: found)
    monkeypatch.setattr(cuda, "_THREAD", threading.local())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return found


def in_new_thread(driver: Driver) -> int | None:
    """The context that a thread without one has after it loaded a kernel, or None if the load failed."""
    found: list[int | None] = []

    def load() -> None:
        try:
            cuda.CudaKernel(b"", "kernel", torch.device("cuda", 3), 128, 0)
            found.append(driver.context)
        except RuntimeError:
            found.append(None)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_without_a_context_takes_the_cards(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_new_thread(driver) == 103
    monkeypatch.setattr(cuda, "_hold_context", lambda: None)  # control: the driver refuses
    assert in_new_thread(driver) is None


def test_a_thread_keeps_the_context_it_has(driver: Driver) -> None:
    driver.thread.context = 7
    cuda.CudaKernel(b"", "kernel", torch.device("cuda", 3), 128, 0)
    assert driver.context == 7
