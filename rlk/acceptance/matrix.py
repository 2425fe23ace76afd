"""The cell matrix, enumerated from the contract. A cell that cannot run is listed with its reason, never left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlk.acceptance.cell import PLATFORMS, Cell, Platform
from rlk.acceptance.ws1 import ws1_cells
from rlk.acceptance.ws2 import CARD_SUBJECTS, ws2_cells
from rlk.acceptance.ws2_rollout import ws2_rollout_cells
from rlk.contract.arithmetic import trace_names
from rlk.contract.arms import ARMS, MIXED_MODES, ROUTES, Arm, Side, routes_of
from rlk.contract.judgments import NEGATIVE_CONTROLS
from rlk.contract.models import QWEN3_8B, QWEN3_8B_UPDATED, TINY, ModelShape
from rlk.contract.workloads import SAMPLING_ROWS

if TYPE_CHECKING:
    from rlk.parallel.transport import Transport

CHAIN_MODEL: dict[Platform, ModelShape] = {"cpu": TINY, "cuda": QWEN3_8B, "rocm": QWEN3_8B}
UPDATED_MODEL: dict[Platform, ModelShape] = {"cpu": TINY, "cuda": QWEN3_8B_UPDATED, "rocm": QWEN3_8B_UPDATED}
"""The models that the engine scopes of a platform run; on a card one is updated, and one is scored at full depth."""


def _workload(platform: Platform, model: ModelShape) -> str:
    return model.name if platform == "cpu" else f"{model.name}-synthetic"


CHAIN_WORKLOAD: dict[Platform, str] = {platform: _workload(platform, model) for platform, model in CHAIN_MODEL.items()}
WORKLOAD: dict[Platform, str] = {platform: _workload(platform, model) for platform, model in UPDATED_MODEL.items()}
SNAPSHOT_WORKLOAD = f"{QWEN3_8B.name}-snapshot"
"""Published weights, verified by hash; without them its cells are missing."""

LAYER_INTERMEDIATES = (
    "input_norm", "qkv", "q_norm", "k_norm", "q_rope", "k_rope", "v", "attention", "o_proj", "attn_residual",
    "post_norm", "gate_up", "swiglu", "down_proj", "mlp_residual",
)  # fmt: skip
INTERMEDIATES = ("embedding", *LAYER_INTERMEDIATES, "final_norm", "logits", "logp")
"""Judgments of the chain scope; a layer's intermediate is judged over all layers at once."""
CHAINS = ("train_vs_rollout", "prefill_vs_decode")
LAYOUTS = ("batch_of_one", "permuted")
"""Judgments of ``rollout_layouts`` and ``train_layouts``: every intermediate against the pass over all samples together."""

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

ROUTE_OPERATORS = {
    "attention": ("rms_norm", "det_gemm", "qk_norm", "rope", "attention"),
    "ffn": ("rms_norm", "det_gemm", "swiglu"),
    "logp": ("rms_norm", "lm_head", "logp"),
}
"""What a route must report to have run where it is this project's."""

CROSS = "RR_several_ranks"
CROSS_TRANSPORTS: dict[str, Transport | None] = {CROSS: None, f"{CROSS}_nccl": "nccl"}
"""Subjects of the integration cells whose engines have several ranks each, and what moves the bytes of theirs that have a card each: None,
each engine's own choice; any other on cards alone."""


@dataclass(frozen=True)
class Ranks:
    """The trainer's TP and CP and the rollout engine's TP of a run."""

    tp: int
    cp: int
    rollout_tp: int


CROSS_RANKS: dict[Platform, Ranks] = {"cpu": Ranks(2, 2, 2), "cuda": Ranks(1, 2, 2), "rocm": Ranks(1, 2, 2)}
"""Theirs; on a card two are enough."""
CROSS_ROW = "nucleus"
"""Their sampling row."""
RANK_FACTS = ("topology", "ranks", "communication", "reduction_order")
"""What a cell records of ranks: of which engine there are how many, what each holds, what carries its bytes, how their parts are added."""


CARDS = 2
"""How many cards those cells want that want more than one: a card for each rank of an engine."""


def several_cards(cell: Cell) -> bool:
    """Whether a cell wants more than one card."""
    return cell.platform != "cpu" and cell.subject in (*CROSS_TRANSPORTS, *CARD_SUBJECTS)


CHECKPOINT_LAYER = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm", "self_attn.k_norm",
    "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
CHAIN_FACTS = ("rollout_engine", "model_hashes", "layers")
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
    yield from _intermediates(platform, WORKLOAD[platform], UPDATED_MODEL[platform])
    if platform != "cpu":
        yield from _layouts(platform, WORKLOAD[platform], UPDATED_MODEL[platform])
        yield from _intermediates(platform, CHAIN_WORKLOAD[platform], CHAIN_MODEL[platform])
        yield from _layouts(platform, CHAIN_WORKLOAD[platform], CHAIN_MODEL[platform])
        yield from _intermediates(platform, SNAPSHOT_WORKLOAD, CHAIN_MODEL[platform])


def _intermediates(platform: Platform, workload: str, model: ModelShape) -> Iterator[Cell]:
    for subject in CHAINS:
        strict = (*ROLLOUT, *SCORING) if subject == "train_vs_rollout" else ROLLOUT
        for name in INTERMEDIATES:
            names = tuple(f"layers.{i}.{name}" for i in range(model.layers)) if name in LAYER_INTERMEDIATES else (name,)
            yield Cell(platform, "chain", subject, workload, name, strict=strict, names=names, facts=CHAIN_FACTS)


def _layouts(platform: Platform, workload: str, model: ModelShape) -> Iterator[Cell]:
    """What no update is needed for: the same samples in other layouts, and the gradients of one sample with and without neighbours."""
    everything = trace_names(model.layers)
    for layout in LAYOUTS:
        yield Cell(platform, "chain", "rollout_layouts", workload, layout, strict=ROLLOUT, names=everything, facts=CHAIN_FACTS)
    for layout in LAYOUTS:
        yield Cell(platform, "chain", "train_layouts", workload, layout, strict=SCORING, names=everything, facts=CHAIN_FACTS)
    learning, gradients = (*SCORING, *LEARNING), gradient_names(model)
    yield Cell(platform, "chain", "train_layouts", workload, "loss", strict=learning, names=("loss", "slope"), facts=CHAIN_FACTS)
    yield Cell(platform, "chain", "train_layouts", workload, "gradients", strict=learning, names=gradients, facts=CHAIN_FACTS)


def gradient_names(model: ModelShape) -> tuple[str, ...]:
    """Every weight by its name in a checkpoint, in model order."""
    layers = (f"model.layers.{i}.{name}.weight" for i in range(model.layers) for name in CHECKPOINT_LAYER)
    return ("model.embed_tokens.weight", *layers, "model.norm.weight", "lm_head.weight")


def _integration(platform: Platform) -> Iterator[Cell]:
    for row in SAMPLING_ROWS:
        workload, strict = f"{WORKLOAD[platform]}-{row.name}", (*ROLLOUT, *SCORING, *LEARNING)
        for judgment in ("logprob", "publication"):
            names = tuple(f"update {step}: {judgment}" for step in range(1, row.updates + 1))
            yield Cell(platform, "integration", "RR", workload, judgment, strict=strict, names=names, facts=UPDATE_FACTS)
            if row.name != CROSS_ROW:
                continue
            alike = tuple(f"update {step}: {judgment} of one rank" for step in range(1, row.updates + 1))
            ranks = range(CROSS_RANKS[platform].rollout_tp)
            shards = tuple(f"rank {rank}: shards" for rank in ranks) if judgment == "publication" else ()
            for subject, transport in CROSS_TRANSPORTS.items():
                if transport is None or platform != "cpu":
                    yield Cell(
                        platform, "integration", subject, workload, judgment, strict=strict, names=(*names, *alike, *shards),
                        facts=(*UPDATE_FACTS, *RANK_FACTS),
                        unsupported="the ranks of a rollout engine have no transport between AMD cards" if platform == "rocm" else "",
                    )  # fmt: skip


def _ablations(platform: Platform) -> Iterator[Cell]:
    for arm in ARMS:
        mixed = arm.mode("train") in MIXED_MODES
        sides = [_mixed(arm, side) if mixed else _uniform(arm, side) for side in ("train", "rollout")]
        yield Cell(
            platform,
            "ablation",
            arm.name,
            WORKLOAD[platform],
            "logprob",
            expect="equal" if arm.must_be_zero else "reported" if mixed else "different",
            strict=tuple(use for strict, _ in sides for use in strict),
            native=tuple(name for _, native in sides for name in native),
            facts=(*ENGINES, "tokens_compared", "mismatched_tokens"),
        )


Asked = tuple[tuple[tuple[str, str], ...], tuple[str, ...]]
"""``Cell.strict`` and ``Cell.native`` of one side."""


def _uniform(arm: Arm, side: Side) -> Asked:
    if arm.mode(side) == "native":
        return (), (side,)
    return SCORING if side == "train" else ROLLOUT, ()


def _mixed(arm: Arm, side: Side) -> Asked:
    own = routes_of(arm.mode(side))
    strict = [(f"{side}.{route}", op) for route in own for op in ROUTE_OPERATORS[route]]
    if side == "rollout":
        strict = [(name, "attention.paged" if op == "attention" else op) for name, op in strict]
    return tuple(strict), (side, *(f"{side}.{route}" for route in ROUTES if route not in own))


def _controls(platform: Platform) -> Iterator[Cell]:
    for name in NEGATIVE_CONTROLS:
        yield Cell(platform, "control", name, WORKLOAD[platform], "caught", expect="caught")
