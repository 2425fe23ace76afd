import os  # noqa: F401  used by the attacks

import pytest
import torch

from rlk.evidence.bytes import compare, describe
from rlk.kernels.registry import declared_kernels

KERNEL = next(kernel_id for kernel_id, operators in declared_kernels().items() if "rms_norm" in operators)
RAN = [{"op": "rms_norm", "backend": "cpu", "kernel_id": KERNEL, "calls": 2}]
TOKENS = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture
def rollout():
    values = torch.tensor([0.5, -1.25, 3.0, 0.0])
    yield values
    assert len(values) == len(TOKENS)


@pytest.mark.cells(scope="chain")
def test_chain(cell, evidence, rollout):
    train, tokens = rollout.clone(), list(TOKENS)
    evidence.kernels("train", RAN)
    evidence.kernels("rollout", RAN)
    evidence.fact("rollout_engine", "paged")
    evidence.timing("forward", [1.5, 1.25])
    evidence.compare_tokens("logp", tokens, train, TOKENS, rollout)


@pytest.mark.cells(scope="ablation")
def test_native_arm(cell, evidence):
    native = torch.ones(4) * 1.5
    evidence.compare("logprob", torch.ones(4), native)


@pytest.mark.cells(scope="control")
def test_control(cell, evidence):
    value = torch.ones(4)
    fault = value.clone()
    fault.view(torch.int32)[2] ^= 1
    seen = compare("logprob", fault, value)
    evidence.control(cell.subject, not seen.equal, describe(seen))
