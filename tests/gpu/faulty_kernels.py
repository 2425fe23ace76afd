"""Kernels with a fault that a memory checker must see; the argument names one."""

from __future__ import annotations

import sys

import torch

SOURCES = {
    "past the end": 'extern "C" __global__ void fault(float* x) { x[threadIdx.x] += x[threadIdx.x + 4096]; }',
    "race": """extern "C" __global__ void fault(float* x) {
        __shared__ float line[256];
        line[threadIdx.x] = x[threadIdx.x];
        x[threadIdx.x] = line[255 - threadIdx.x];
    }""",
}

if __name__ == "__main__":
    kernel = torch.cuda._compile_kernel(SOURCES[sys.argv[1]], "fault")
    kernel(grid=(1, 1, 1), block=(256, 1, 1), args=[torch.zeros(256, device="cuda")])
    torch.cuda.synchronize()
    print(f"{sys.argv[1]} ran", flush=True)
