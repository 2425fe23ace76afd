"""The cell matrix, enumerated from the contract. A cell that cannot run is listed with its reason, never left out."""

from __future__ import annotations

from collections.abc import Iterator

from rlk.acceptance.cell import PLATFORMS, Cell, Platform
from rlk.acceptance.ws1 import ws1_cells
from rlk.acceptance.ws2 import ws2_cells
from rlk.acceptance.ws2_rollout import ws2_rollout_cells
from rlk.contract.judgments import NEGATIVE_CONTROLS
from rlk.contract.models import QWEN3_8B, TINY, ModelShape
from rlk.contract.workloads import ARMS, SAMPLING_ROWS

MODEL: dict[Platform, ModelShape] = {"cpu": TINY, "cuda": QWEN3_8B, "rocm": QWEN3_8B}
WORKLOAD: dict[Platform, str] = {platform: model.name for platform, model in MODEL.items()}
"""The model that the engine scopes of a platform run."""

LAYER_INTERMEDIATES = (
    "input_norm", "qkv", "q_norm", "k_norm", "q_rope", "k_rope", "v", "attention", "o_proj", "attn_residual",
    "post_norm", "gate_up", "swiglu", "down_proj", "mlp_residual",
)  # fmt: skip
INTERMEDIATES = ("embedding", *LAYER_INTERMEDIATES, "final_norm", "logits", "logp")
"""Judgments of the chain scope; a layer's intermediate is judged over all layers at once."""
CHAINS = ("train_vs_rollout", "prefill_vs_decode")

FORWARD = ("embedding", "rms_norm", "qk_norm", "rope", "det_gemm", "swiglu", "lm_head", "logp")
ROLLOUT = tuple(("rollout", op) for op in (*FORWARD, "attention.paged"))
SCORING = tuple(("train", op) for op in (*FORWARD, "attention"))
LEARNING = tuple(
    ("train", op)
    for op in (
        "embedding.weight_grad", "rms_norm.backward", "rms_norm.gamma_grad", "qk_norm.backward", "qk_norm.gamma_grad", "rope.backward",
        "det_gemm.input_grad", "det_gemm.weight_grad", "attention.backward", "swiglu.backward", "lm_head.input_grad",
        "lm_head.weight_grad", "logp.backward",
    )
)  # fmt: skip
"""What a strict side must report to have run."""

ROLLOUT_TP2, ROLLOUT_TP2_ROW = "RR_rollout_tp2", "nucleus"
"""Subject of the integration cells whose rollout engine has two tensor parallel ranks, and their sampling row."""

ENGINES = ("rollout_engine", "train_engine")
UPDATE_FACTS = (*ENGINES, "model_hashes", "reward_per_step", "kl_per_step", "tokens_compared")


def enumerate_cells(platform: Platform) -> tuple[Cell, ...]:
    """Every cell of one platform in a fixed order, unsupported ones included."""
    engines = (*_chain(platform), *_integration(platform), *_ablations(platform), *_controls(platform))
    return (*ws1_cells(platform), *ws2_cells(platform), *ws2_rollout_cells(platform), *engines)


def all_cells() -> tuple[Cell, ...]:
    """Every cell of every platform."""
    return tuple(cell for platform in PLATFORMS for cell in enumerate_cells(platform))


def _chain(platform: Platform) -> Iterator[Cell]:
    for subject in CHAINS:
        strict = (*ROLLOUT, *SCORING) if subject == "train_vs_rollout" else ROLLOUT
        for name in INTERMEDIATES:
            names = tuple(f"layers.{i}.{name}" for i in range(MODEL[platform].layers)) if name in LAYER_INTERMEDIATES else (name,)
            facts = ("rollout_engine", "model_hashes")
            yield Cell(platform, "chain", subject, WORKLOAD[platform], name, strict=strict, names=names, facts=facts)


def _integration(platform: Platform) -> Iterator[Cell]:
    for row in SAMPLING_ROWS:
        workload, strict = f"{WORKLOAD[platform]}-{row.name}", (*ROLLOUT, *SCORING, *LEARNING)
        for judgment in ("logprob", "publication"):
            names = tuple(f"update {step}: {judgment}" for step in range(1, row.updates + 1))
            yield Cell(platform, "integration", "RR", workload, judgment, strict=strict, names=names, facts=UPDATE_FACTS)
            if row.name == ROLLOUT_TP2_ROW:
                ranks = ("rank 0: shards", "rank 1: shards") if judgment == "publication" else ()
                yield Cell(
                    platform, "integration", ROLLOUT_TP2, workload, judgment, strict=strict, names=(*names, *ranks), facts=UPDATE_FACTS
                )


def _ablations(platform: Platform) -> Iterator[Cell]:
    for arm in ARMS:
        uniform = arm.attention == arm.ffn == arm.logp
        train, rollout = arm.attention.split("/") if uniform else ("", "")
        yield Cell(
            platform,
            "ablation",
            arm.name,
            WORKLOAD[platform],
            "logprob",
            expect="equal" if arm.must_be_zero else "different",
            strict=(*(SCORING if train == "R" else ()), *(ROLLOUT if rollout == "R" else ())),
            native=(*(("train",) if train == "P" else ()), *(("rollout",) if rollout == "P" else ())),
            facts=(*ENGINES, "tokens_compared"),
            unsupported="" if uniform else "no engine here mixes native and rlk operators inside one model",
        )


def _controls(platform: Platform) -> Iterator[Cell]:
    for name in NEGATIVE_CONTROLS:
        yield Cell(platform, "control", name, WORKLOAD[platform], "caught", expect="caught")
