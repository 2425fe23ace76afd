"""Kernels with a fault that a memory checker must see; the argument names one."""

from __future__ import annotations

import sys

import torch

SOURCES = {
    "past the end": 'extern "C" __global__ void fault(float* x) { x[threadIdx.x] += x[threadIdx.x + 4096]; }',
    "one past the end": 'extern "C" __global__ void fault(float* x) { if (x[256] != 1.0f) x[0] = 1.0f; }',
    "before the start": 'extern "C" __global__ void fault(float* x) { x[-1 - int(threadIdx.x)] = 1.0f; }',
    "race": """extern "C" __global__ void fault(float* x) {
        __shared__ float line[256];
        line[threadIdx.x] = x[threadIdx.x];
        x[threadIdx.x] = line[255 - threadIdx.x];
    }""",
}


def run(name: str) -> None:
    """One launch of 256 threads over 256 floats."""
    kernel = torch.cuda._compile_kernel(SOURCES[name], "fault")
    kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[torch.zeros(256, device="cuda")])


if __name__ == "__main__":
    run(sys.argv[1])
    torch.cuda.synchronize()
    print(f"{sys.argv[1]} ran", flush=True)
