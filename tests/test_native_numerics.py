"""The CPU backend's shared arithmetic: accuracy of exp and log, vector body against tail, rounding, summation orders, subnormals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlk.kernels._native import NativeLibrary

PROBE = NativeLibrary("numerics_probe", Path(__file__).parent / "data" / "numerics_probe.cpp")
INF, NAN = math.inf, math.nan

# name → (exact function, smallest and largest argument with a result other than 0 or inf, error bound in ulp)
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float, float]] = {
    "exp": (torch.exp, -104.0, 88.72, 1.1),
    "exp2": (torch.exp2, -150.0, 127.99999, 1.0),
    "log": (torch.log, 1e-45, 3.4e38, 1.0),
    "log2": (torch.log2, 1e-45, 3.4e38, 1.0),
}


def _apply(name: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, NAN)
    PROBE.call(f"probe_{name}", x, y, x.numel())
    return y


def _every_nth_float(step: int, low: float, high: float) -> torch.Tensor:
    bits = torch.arange(-(2**31), 2**31, step, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    return x[(x >= low) & (x <= high)]


def _ulp_error(y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|y − exact| in units of the last fp32 place of ``exact`` (fp64)."""
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.ones_like(exact), (exponent - 24).clamp(min=-149))
    return (y.double() - exact).abs() / unit


def _worst_error(name: str, reference: str) -> float:
    function, low, high, _ = FUNCTIONS[reference]
    near_zero = torch.linspace(-1.0, 1.0, 20001)
    x = torch.cat((_every_nth_float(2539, low, high), near_zero[(near_zero >= low) & (near_zero <= high)]))
    assert x.numel() > 100_000
    return float(_ulp_error(_apply(name, x), function(x.double())).max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_below_its_bound(name: str) -> None:
    assert _worst_error(name, name) < FUNCTIONS[name][3]


def test_the_error_bound_catches_a_careless_exp() -> None:
    assert _worst_error("careless_exp", "exp") > 10 * FUNCTIONS["exp"][3]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("exp", [0.0, -0.0, -INF, INF, -1000.0, 1000.0, 88.8, -104.1], [1.0, 1.0, 0.0, INF, 0.0, INF, INF, 0.0]),
        ("exp2", [0.0, -0.0, -INF, INF, -1000.0, 1000.0, 128.0, -150.1], [1.0, 1.0, 0.0, INF, 0.0, INF, INF, 0.0]),
        ("exp2", [-149.0, -127.0, -126.0, 1.0, 10.0, 127.0], [2.0**-149, 2.0**-127, 2.0**-126, 2.0, 1024.0, 2.0**127]),
        ("log", [1.0, 0.0, -0.0, INF], [0.0, -INF, -INF, INF]),
        ("log2", [1.0, 0.0, -0.0, INF], [0.0, -INF, -INF, INF]),
    ],
)  # fmt: skip
def test_special_values_are_exact_to_the_byte(name: str, arguments: list[float], expected: list[float]) -> None:
    result = _apply(name, torch.tensor(arguments))
    assert result.view(torch.int32).tolist() == torch.tensor(expected).view(torch.int32).tolist()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_nan_in_the_vector_body_and_in_the_tail(name: str) -> None:
    assert _apply(name, torch.full((19,), NAN)).isnan().all()


@pytest.mark.parametrize("name", ["log", "log2"])
def test_logarithm_of_a_negative_number_is_nan(name: str) -> None:
    assert _apply(name, torch.tensor([-1.0, -1e-45, -INF])).isnan().all()


def test_log2_is_exact_at_powers_of_two() -> None:
    exponents = torch.arange(-149, 128).float()
    assert torch.equal(_apply("log2", torch.ldexp(torch.ones_like(exponents), exponents.int())), exponents)


def test_exp_of_a_non_positive_number_is_at_most_one() -> None:
    x = torch.cat((-_every_nth_float(7919, 0.0, 1.0), torch.linspace(-1e-6, 0.0, 1001)))
    assert float(_apply("exp", x).max()) == 1.0
    assert float(_apply("exp2", x).max()) == 1.0


@pytest.mark.parametrize("name", [*FUNCTIONS, "to_bf16"])
def test_value_does_not_depend_on_alignment_or_length(name: str) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 30
    x = torch.cat((x.abs() if "log" in name else x, torch.tensor([1e-40, 0.0, INF, NAN])))[
        torch.randperm(68, generator=torch.Generator().manual_seed(2))
    ]
    view = torch.int16 if name == "to_bf16" else torch.int32

    def run(begin: int, end: int) -> torch.Tensor:
        y = torch.zeros(end - begin, dtype=view)
        PROBE.call(f"probe_{name}", x[begin:end], y, end - begin)
        return y

    alone = torch.cat([run(i, i + 1) for i in range(68)])
    for begin in range(17):
        for end in range(begin + 1, 69):
            assert torch.equal(run(begin, end), alone[begin:end]), (begin, end)


def test_to_bf16_rounds_to_nearest_even_as_torch_does() -> None:
    low = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = ((torch.arange(2**16)[:, None] << 16) + low).flatten()
    x = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    y = torch.empty(x.numel(), dtype=torch.bfloat16)
    PROBE.call("probe_to_bf16", x, y, x.numel())
    nan = x.isnan()
    assert int(nan.sum()) == 6 * 2 * 128 - 2
    assert torch.equal(y[~nan].view(torch.int16), x[~nan].bfloat16().view(torch.int16))
    assert y[nan].isnan().all()
    assert torch.equal(y[nan].signbit(), x[nan].signbit())


def test_to_bf16_is_not_truncation() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    y = torch.empty(1000, dtype=torch.int16)
    PROBE.call("probe_to_bf16", x, y, 1000)
    truncated = (x.view(torch.int32) >> 16).to(torch.int16)
    assert 300 < int((y != truncated).sum()) < 700


def test_from_bf16_is_exact() -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    y = torch.empty(2**16)
    PROBE.call("probe_from_bf16", x, y, 2**16)
    assert torch.equal(y.view(torch.int32), x.float().view(torch.int32))


def _upper_onto_lower(values: torch.Tensor) -> float:
    width = 1 << (values.numel() - 1).bit_length()
    values = torch.cat((values, torch.zeros(width - values.numel())))
    while values.numel() > 1:
        values = values[: values.numel() // 2] + values[values.numel() // 2 :]
    return float(values)


def _adjacent_pairs(values: torch.Tensor) -> float:
    while values.numel() > 1:
        values = values[0::2] + values[1::2]
    return float(values)


def _one_after_another(values: torch.Tensor) -> float:
    total = torch.zeros(())
    for value in values:
        total = total + value
    return float(total)


def test_row_tree_adds_the_upper_half_onto_the_lower() -> None:
    orders_differ = 0
    for n in range(1, 131):
        values = torch.randn(n, generator=torch.Generator().manual_seed(n))
        scratch = torch.cat((values, torch.full((256 - n,), NAN)))
        out = torch.empty(1)
        PROBE.call("probe_row_tree_sum", scratch, out, n)
        assert float(out) == _upper_onto_lower(values)
        orders_differ += float(out) != _one_after_another(values)
    assert orders_differ > 50


@pytest.mark.parametrize("stride", [1, 5])
def test_pair_tree_adds_adjacent_pairs(stride: int) -> None:
    orders_differ = 0
    for seed in range(40):
        for count in (1, 2, 4, 8, 16):
            values = torch.randn(count, stride, generator=torch.Generator().manual_seed(seed))
            out = torch.empty(1)
            PROBE.call("probe_pair_tree_sum", values.clone(), out, count, stride)
            assert float(out) == _adjacent_pairs(values[:, 0])
            orders_differ += float(out) != _upper_onto_lower(values[:, 0])
    assert orders_differ > 20


def test_group_of_sixteen_products_is_a_row_tree() -> None:
    orders_differ = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(2, 16, generator=generator) * 8 ** torch.randn(2, 16, generator=generator)).bfloat16().float()
        out = torch.empty(1)
        PROBE.call("probe_group_dot", a, b, out)
        assert float(out) == _upper_onto_lower(a * b)
        orders_differ += float(out) != _one_after_another(a * b)
    assert orders_differ > 30


def _flushes() -> tuple[int, int]:
    threads, flushed = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    PROBE.call("probe_flush", threads, flushed)
    return int(threads), int(flushed)


def test_no_thread_flushes_subnormals_to_zero() -> None:
    threads, flushed = _flushes()
    assert threads >= 1
    assert flushed == 0


def test_the_flush_probe_sees_a_flushing_thread() -> None:
    if not torch.set_flush_denormal(True):
        pytest.fail("this CPU cannot flush subnormals, so the probe cannot be checked")
    try:
        assert _flushes()[1] >= 1
    finally:
        torch.set_flush_denormal(False)
    assert _flushes()[1] == 0
