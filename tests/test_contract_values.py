"""Values that are checked when they are built: numerics, sampling, records, settings, optimizer and loss constants."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk.contract.numerics import DEFAULT, ContractError, Numerics, ceil_to, round_fp32
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.settings import REFUSED, require_neutral, require_padding, require_settings
from rlk.contract.update import AdamParams, GrpoParams, clip_scale, group_advantages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"canonical_tp": 3}, "canonical_tp=3 is not a power of two: use 1, 2, 4 or 8"),
        ({"canonical_cp": 0}, "canonical_cp=0 is not a power of two"),
        ({"mma_k": 8}, "mma_k=8: contract version 1 adds groups of 16"),
        ({"kv_tile": 24}, "kv_tile=24 is not a positive multiple of mma_k=16"),
        ({"kv_tile": 0}, "kv_tile=0 is not a positive multiple"),
        ({"kv_split": 48}, "kv_split=48 is neither 0 nor a multiple of kv_tile=32"),
        ({"kv_split": -32}, "kv_split=-32 is neither 0 nor a multiple"),
        ({"kv_split": 0}, "attention_family=fixed-split does not fit kv_split=0"),
        ({"attention_family": "vendor-one-split"}, "attention_family=vendor-one-split does not fit kv_split=64"),
        ({"vocab_tile": 0}, "vocab_tile=0 must be positive"),
    ],
)
def test_numerics_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Numerics(**fields)


def test_the_vendor_family_asks_for_the_vendor_on_a_card_only() -> None:
    vendor = Numerics(kv_split=0, attention_family="vendor-one-split")
    assert [vendor.attention_backend(device) for device in ("cpu", "cuda")] == [None, "vendor"]
    assert [DEFAULT.attention_backend(device) for device in ("cpu", "cuda")] == [None, None]


def test_every_value_that_fixes_bytes_is_recorded() -> None:
    record = DEFAULT.record(vocab_size=151936, backend="cpu")
    assert record == {
        "contract_version": 1, "canonical_tp": 8, "canonical_cp": 8, "mma_k": 16, "kv_tile": 32, "kv_split": 64, "vocab_tile": 1024,
        "attention_family": "fixed-split", "padded_vocab": 152576, "backend": "cpu",
    }  # fmt: skip


@given(st.floats(allow_nan=False))
def test_round_fp32_is_what_a_cast_does(value: float) -> None:
    rounded = round_fp32(value)
    assert math.isinf(rounded) or struct.unpack("f", struct.pack("f", rounded))[0] == rounded
    assert math.copysign(1, rounded) == math.copysign(1, value)
    assert round_fp32(rounded) == rounded


def test_round_fp32_breaks_ties_to_even_and_overflows() -> None:
    assert round_fp32(1 + 2**-24) == 1.0
    assert round_fp32(1 + 3 * 2**-24) == 1 + 2**-22
    assert round_fp32(-1e39) == -math.inf


@given(st.integers(0, 1000), st.integers(1, 64))
def test_ceil_to(value: int, multiple: int) -> None:
    assert ceil_to(value, multiple) % multiple == 0
    assert 0 <= ceil_to(value, multiple) - value < multiple


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.5}, "temperature=-0.5 is not a finite fp32 number >= 0: use 0 for greedy"),
        ({"temperature": math.nan}, "temperature=nan is not a finite"),
        ({"temperature": math.inf}, "temperature=inf is not a finite"),
        ({"temperature": 1e39}, r"temperature=1e\+39 is not a finite"),
        ({"temperature": 0.001}, "temperature=0.001 would be raised to 0.01 by the engine: use 0 for greedy"),
        ({"top_p": 0.0}, r"top_p=0.0 is outside \(0, 1\]: use 1 to keep every token"),
        ({"top_p": 1.5}, "top_p=1.5 is outside"),
        ({"top_p": math.nan}, "top_p=nan is outside"),
        ({"top_k": 0}, "top_k=0 is neither -1 nor >= 1: use -1 to keep every token"),
        ({"top_k": -2}, "top_k=-2 is neither"),
        ({"max_tokens": 0}, "max_tokens=0 asks for no token: use 1 or more"),
        ({"seed": -1}, "seed=-1 does not fit a non-negative int64"),
        ({"seed": 2**63}, "does not fit a non-negative int64"),
    ],
)
def test_sampling_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("sampling", "greedy", "truncates", "scored_at"),
    [
        (SamplingParams(), False, False, 1.0),
        (SamplingParams(0.7, 0.95), False, True, 0.7),
        (SamplingParams(1.3, 1.0, 128), False, True, 1.3),
        (SamplingParams(0.0, 0.5, 3), True, False, 1.0),
    ],
)
def test_sampling_properties(sampling: SamplingParams, greedy: bool, truncates: bool, scored_at: float) -> None:
    assert (sampling.greedy, sampling.truncates, sampling.scoring_temperature) == (greedy, truncates, scored_at)


def _response(**fields: Any) -> Response:
    usual = {
        "sample_id": 3, "prompt_ids": (1, 2), "token_ids": (5, 7), "logprobs": (-0.5, -1.25), "support": None, "finish_reason": "length",
        "cached_tokens": 0, "weight_version": 0,
    }  # fmt: skip
    return Response(**{**usual, **fields})


def test_records_accept_what_is_whole() -> None:
    assert _response(support=((2, 5), (7,))).length == 4
    assert _response(token_ids=(), logprobs=()).length == 2
    assert Request(0, (1,), SamplingParams()).prompt_ids == (1,)


def test_records_survive_a_journey_as_json() -> None:
    request = Request(3, (1, 2), SamplingParams(temperature=0.7, top_k=5, seed=9))
    assert Request.from_plain(json.loads(json.dumps(asdict(request)))) == request
    for response in (_response(), _response(support=((2, 5), (7,)))):
        assert Response.from_plain(json.loads(json.dumps(asdict(response)))) == response


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": ()}, "response 3: prompt_ids is empty: give at least one token"),
        ({"token_ids": (5, -1)}, "response 3: token_ids holds -1: token ids start at 0"),
        ({"logprobs": (-0.5,)}, "response 3: 1 logprobs for 2 tokens: hand over one per token"),
        ({"logprobs": (-0.5, math.nan)}, "logprob nan at token 1 is not a finite fp32 value: hand over the kernel's result"),
        ({"logprobs": (-math.inf, -0.5)}, "logprob -inf at token 0 is not a finite fp32 value"),
        ({"logprobs": (-0.1, -0.5)}, "logprob -0.1 at token 0 is not a finite fp32 value"),
        ({"logprobs": (-1e39, -0.5)}, r"logprob -1e\+39 at token 0 is not a finite fp32 value"),
        ({"support": ((5,),)}, "1 supports for 2 tokens: hand over the retained ids of every token"),
        ({"support": ((5,), (8, 7))}, "support at token 1 is not strictly ascending: sort the retained ids"),
        ({"support": ((5,), (7, 7))}, "support at token 1 is not strictly ascending"),
        ({"support": ((5,), (6, 8))}, "token id 7 at token 1 is outside its own support: record ids where the token is drawn"),
    ],
)
def test_responses_refuse_what_is_missing_or_misaligned(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _response(**fields)


@pytest.mark.parametrize(("ids", "message"), [((), "request 4: prompt_ids is empty"), ((1, -3), "request 4: prompt_ids holds -3")])
def test_requests_refuse(ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Request(4, ids, SamplingParams())


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_move_or_scale_values_are_refused(name: str) -> None:
    require_settings(dict.fromkeys(REFUSED, False))
    with pytest.raises(ContractError, match=f"^{name} is on: .*: (turn it off|use|pack)"):
        require_settings({**dict.fromkeys(REFUSED, False), name: True})


def test_an_unknown_setting_is_not_waved_through() -> None:
    with pytest.raises(ContractError, match="sequence_paralel is not a setting the contract judges: use one of sequence_parallel"):
        require_settings({"sequence_paralel": False})


def test_other_paddings_are_refused() -> None:
    require_padding([19, 16], [32, 16])
    with pytest.raises(ContractError, match="sample 1 of 19 tokens is padded to 20: pad to 32, or chunks hold other tokens than leaves"):
        require_padding([16, 19], [16, 20])
    with pytest.raises(ContractError, match="1 padded lengths for 2 samples: give one per sample"):
        require_padding([16, 19], [16])


@pytest.mark.parametrize("value", [0.5, 1 + 2**-52, math.nan])
def test_late_scales_are_refused(value: float) -> None:
    require_neutral({"num_microbatches": 1.0})
    with pytest.raises(ContractError, match=f"num_microbatches={value} scales gradients after the loss boundary: make it exactly 1"):
        require_neutral({"num_microbatches": value})


def test_adam_scalars_are_fp32_and_computed_in_fp64() -> None:
    step = AdamParams().step(3)
    assert all(round_fp32(value) == value for value in vars(step).values())
    assert step.one_minus_beta1 == round_fp32(1 - 0.9) != round_fp32(1 - round_fp32(0.9))
    assert step.correction2 == round_fp32(1 - 0.98**3)
    assert AdamParams().step(1).correction1 == step.one_minus_beta1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta1": 1.0}, r"beta1=1.0 is outside \[0, 1\): use a decay below 1"),
        ({"beta2": -0.1}, "beta2=-0.1 is outside"),
        ({"lr": 0.0}, "lr=0.0 is not a positive finite number"),
        ({"eps": math.nan}, "eps=nan is not a positive finite number"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0 is not a finite number >= 0: use 0 for none"),
    ],
)
def test_adam_refuses(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        AdamParams(**fields)


def test_the_first_step_is_one() -> None:
    with pytest.raises(ContractError, match="optimizer step 0: the first step is 1"):
        AdamParams().step(0)


def test_clip_scale_is_exactly_one_below_the_limit() -> None:
    assert clip_scale(0.0) == clip_scale(0.9) == 1.0
    assert clip_scale(4.0) == round_fp32(1.0 / (4.0 + 1e-6)) < 0.25
    assert clip_scale(2.0, max_norm=3.0) == 1.0


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_a_broken_norm_raises(norm: float) -> None:
    with pytest.raises(ContractError, match=f"gradient norm {norm} is not a finite number >= 0: find the first non-finite gradient"):
        clip_scale(norm)


def test_group_advantages() -> None:
    assert group_advantages([1.0, 0.0]) == (0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6))
    assert group_advantages([0.3]) == (0.0,)
    assert group_advantages([0.1] * 3) == (0.0,) * 3


@given(st.lists(st.integers(0, 1), min_size=1, max_size=16))
def test_advantages_sum_to_zero(rewards: list[int]) -> None:
    assert abs(sum(group_advantages([float(r) for r in rewards]))) < 1e-9


def test_loss_refusals() -> None:
    with pytest.raises(ContractError, match="group_size=0 holds no sample: use 1 or more"):
        GrpoParams(group_size=0)
    for name in ("clip_low", "clip_high", "kl_coef"):
        with pytest.raises(ContractError, match=f"{name}=-0.1 is not a finite number >= 0: use 0 or more"):
            GrpoParams(**{name: -0.1})  # type: ignore[arg-type]
    for rewards in ([], [1.0, math.nan]):
        with pytest.raises(ContractError, match="are empty or not finite: score every sample of the group"):
            group_advantages(rewards)
