"""Failures seen in public, each with the cells and tests that would see it here.

A case without code to judge it yet is MISSING by name: ``missing`` says what it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlk.acceptance.cell import Platform
from rlk.acceptance.matrix import CHAIN_WORKLOAD, WORKLOAD


@dataclass(frozen=True)
class Case:
    """One public failure. seen: where it was reported. failure: what broke. cells, tests: what owns it; missing: what it waits for.

    A test of ``gpu/`` is a check that is run on a card by hand.
    """

    number: int
    seen: str
    failure: str
    cells: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    missing: str = ""


def lookup(number: int) -> Case:
    """Case by number; raises KeyError with the range that exists."""
    for case in CASES:
        if case.number == number:
            return case
    raise KeyError(f"case {number} is not registered: use 1 … {len(CASES)}")


def _ws1(operator: str, tier: str, *judgments: str) -> tuple[str, ...]:
    """The operator's cells on a CPU, and those of its Triton kernels on a card."""
    places = ("cpu", "cpu"), ("cuda", "triton")
    return tuple(f"{platform}/ws1/{operator}/{tier}-{backend}/{judgment}" for platform, backend in places for judgment in judgments)


_PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda")


def _chain(chain: str, intermediate: str) -> tuple[str, ...]:
    return tuple(f"{platform}/chain/{chain}/{CHAIN_WORKLOAD[platform]}/{intermediate}" for platform in _PLATFORMS)


def _update(row: str, *judgments: str) -> tuple[str, ...]:
    return tuple(f"{platform}/integration/RR/{WORKLOAD[platform]}-{row}/{judgment}" for platform in _PLATFORMS for judgment in judgments)


def _control(fault: str) -> tuple[str, ...]:
    return tuple(f"{platform}/control/{fault}/{WORKLOAD[platform]}/caught" for platform in _PLATFORMS)


def _ablation(arm: str) -> tuple[str, ...]:
    return tuple(f"{platform}/ablation/{arm}/{WORKLOAD[platform]}/logprob" for platform in _PLATFORMS)


_FORWARD, _GRADIENT = "forward_invariance", "gradient_invariance"
_UPDATES = tuple(cell for row in ("full", "nucleus", "greedy") for cell in _update(row, "logprob", "publication"))
_GRAPHED = tuple(cell for cell in _UPDATES if cell.startswith("cuda") and cell.endswith("logprob"))
"""On a card the rollout engine decodes by replaying graphs, and the trainer that it is compared with captures none."""

CASES = (
    Case(
        1, "RL-Kernel#81, vime#64", "temperature applied twice or never",
        _update("nucleus", "logprob"),
        ("test_logp.py::test_temperature_is_applied_once", "test_megatron_score.py::test_temperature_is_applied_once"),
    ),
    Case(
        2, "RL-Kernel#162", "an invalid id at a masked position reaches the device",
        tests=(
            "test_logp.py::test_ids_of_inactive_rows_are_never_read",
            "test_embedding.py::test_bad_ids_at_masked_positions_never_reach_the_lookup",
        ),
    ),
    Case(
        3, "RL-Kernel#388", "K read where V lies, with two local KV heads",
        _chain("prefill_vs_decode", "attention"),
        ("test_attention.py::test_key_and_value_planes_and_heads_of_the_cache_are_the_right_ones",),
    ),
    Case(
        4, "RL-Kernel#394", "decode differs from prefill; page-table tails hold garbage",
        (
            *_ws1("attention", "short", _FORWARD), *_ws1("attention", "primary", _FORWARD), *_chain("prefill_vs_decode", "logits"),
        ),
        ("test_attention.py::test_rollout_gives_the_bytes_of_training",),
    ),
    Case(
        5, "RL-Kernel#393", "a compiled graph of one mode serves the other",
        (*_ablation("G00"), *_ablation("G01")),
        ("test_vllm_settings.py::test_everything_else_is_refused_by_name",),
    ),
    Case(
        6, "RL-Kernel#432", "rounding points depend on TP",
        ("cpu/ws2/tp2cp1/tiny-packed/logprob", "cpu/ws2/tp8cp1/tiny-packed/logprob"),
        ("test_contract_examples.py::test_one_rounding", "test_det_gemm.py::test_partials_of_tensor_parallel_ranks_join_to_the_whole"),
    ),
    Case(
        7, "RL-Kernel#432", "rollout CP accepted and ignored",
        ("cpu/ws2/rollout-tp1cp2/tiny-mixed/rollout_logprob",),
        ("test_paged_schedule.py::test_six_tokens_on_two_ranks", "test_contract_topology.py::test_order_is_restored_from_both_layouts"),
    ),
    Case(
        8, "RL-Kernel#264", "values compared where bytes were promised",
        _control("negative_zero"),
        ("test_evidence_bytes.py::test_every_flipped_bit_of_every_float_is_seen", "test_gate_attacks.py::test_attack[-0]"),
    ),
    Case(
        9, "RL-Kernel attention report", "all heads at once differ from slices of heads",
        ("cpu/ws2/tp4cp1/tiny-packed/logprob",),
        ("test_attention.py::test_one_launch_over_all_heads_equals_slices_of_heads",),
    ),
    Case(
        10, "vLLM#50136", "the all-reduce changes with the size of the message",
        ("cpu/ws2/tp2cp1/tiny-packed/logprob", "cpu/ws2/tp2cp1/tiny-single/logprob"),
        ("test_parallel_collectives.py::test_sums_are_tree_sums_at_every_message_size",),
    ),
    Case(
        11, "vLLM#56370", "the order of a reduce-scatter follows the row's owner",
        ("cpu/ws2/tp2cp1/tiny-single/gradients", "cpu/ws2/ring_order/tiny-packed/caught"),
        ("test_parallel_collectives.py::test_subtrees_of_ranks_add_like_one_rank",),
    ),
    Case(
        12, "vLLM#40896, vLLM#5543", "a prefix-cache hit changes the answer",
        tests=("test_vllm_engine.py::test_warm_prefix_equals_cold",),
    ),
    Case(
        13, "vLLM#58131", "long prompts were never tried",
        (*_ws1("attention", "primary", _FORWARD, _GRADIENT), *_ws1("det_gemm", "primary", _FORWARD, _GRADIENT)),
    ),
    Case(
        14, "flashinfer#2270", "prefill chunks that end off a split edge",
        _ws1("attention", "primary", _FORWARD),
        ("test_attention.py::test_chunk_ends_that_are_not_split_edges_do_not_move_them",),
    ),
    Case(
        15, "llm_reproducibility#7", "batch-invariant, and different at another TP",
        tuple(f"cpu/ws2/rollout-tp{tp}cp1/tiny-mixed/rollout_logprob" for tp in (1, 2, 4, 8)),
    ),
    Case(
        16, "SGLang#30752", "a graph that does not match runs eagerly, unnoticed",
        tests=("test_vllm_card.py::test_replays_are_counted", "gpu/check_vllm.py::graphs"),
    ),
    Case(
        17, "slime#830", "exact zero became a small number",
        _UPDATES,
        ("test_gate_judge.py::test_only_a_whole_green_matrix_passes", "test_gate_attacks.py::test_attack[one flipped bit]"),
    ),
    Case(
        18, "slime#1695", "scores jump after a resume",
        ("cpu/ws2/tp1cp1/tiny-packed/checkpoint", "cpu/ws2/tp2cp4/tiny-packed/checkpoint"),
        ("test_megatron_update.py::test_resume_is_exact",),
    ),
    Case(
        19, "miles#1345", "scored again at a fixed temperature",
        _update("nucleus", "logprob"),
        ("test_megatron_score.py::test_rescoring_at_the_requests_temperature_gives_the_rollout",),
    ),
    Case(
        20, "trl#6789, trl#7269", "the kept mass biases the ratio",
        _update("nucleus_top_k", "logprob"),
        (
            "test_logp.py::test_kept_mass_is_not_a_bias_between_two_scores_of_one_support",
            "test_megatron_score.py::test_retained_ids_renormalise",
        ),
    ),
    Case(
        21, "NeMo-RL#4018, SkyRL#2246, prime-rl#1650", "KV of old weights is used after an update",
        (*_control("stale_weight_version"), *_update("full", "publication")),
        ("test_vllm_engine.py::test_weight_update",),
    ),
    Case(
        22, "prime-rl#2438, NeMo-RL#4096", "fp32 logits on one side only",
        _chain("train_vs_rollout", "logits"),
        ("test_logp.py::test_logits_stay_fp32", "test_megatron_score.py::test_logits_stay_fp32"),
    ),
    Case(
        23, "verl#6280", "the micro-batch changes the logprob",
        ("cpu/ws2/tp1cp1/tiny-single/logprob",),
        ("test_megatron_score.py::test_neither_packing_nor_order_nor_micro_batch_changes_a_byte",),
    ),
    Case(
        24, "Megatron#2369", "two deterministic runs differ",
        ("cpu/ws2/tp1cp1/tiny-packed/gradients",),
        ("test_megatron_update.py::test_two_runs_have_equal_gradient_hashes",),
    ),
    Case(
        25, "AReaL#1544", "a flag set after it was read",
        tests=(
            "test_vllm_engine.py::test_strict_engine_is_what_was_asked_for",
            "test_megatron_score.py::test_readback_names_megatrons_classes_and_ours",
        ),
    ),
    Case(
        26, "ms-swift#9947", "a remote vocabulary shard gets no gradient",
        ("cpu/ws2/tp2cp1/tiny-packed/gradients",),
        ("test_logp.py::test_gradient_reaches_every_shard", "test_parallel_logp.py::test_parts_join_to_the_whole"),
    ),
    Case(27, "torchtitan#3629", "K values of one position taken for K positions", tests=("test_logp.py::test_one_id_per_row",)),
    Case(
        28, "verl-omni#637", "a norm rounds after the weight",
        _ws1("rms_norm", "short", "forward_accuracy"),
        ("test_rms_norm.py::test_rounding_after_the_weight_is_another_norm",),
    ),
    Case(
        29, "trl#6800, NeMo-Aligner#68", "left padding moves positions",
        (*_ws1("rope", "short", _FORWARD), *_ws1("pack", "short", _FORWARD)),
        ("test_rope.py::test_left_padding_does_not_shift_positions",),
    ),
    Case(
        30, "pytorch#196031", "a compiled negation drops the sign of zero",
        _control("negative_zero"),
        ("test_vllm_settings.py::test_everything_else_is_refused_by_name", "test_cases.py::test_negation_keeps_the_sign_of_zero"),
    ),
    Case(
        31, "vLLM#48271", "the norm's kernel changes at 256 tokens",
        (*_ws1("rms_norm", "short", _FORWARD, _GRADIENT), *_ws1("rms_norm", "primary", _FORWARD)),
    ),
    Case(
        32, "vLLM#28131", "graphs change the batch's bytes",
        _GRAPHED,
        ("gpu/check_graphs.py::padded", "gpu/check_vllm.py::together"),
    ),
    Case(
        33, "Megatron-LM", "a norm's reduction depends on the number of tokens modulo 32",
        (*_ws1("rms_norm", "short", _FORWARD, _GRADIENT), *_ws1("qk_norm", "short", _FORWARD, _GRADIENT)),
    ),
    Case(
        34, "flashinfer#4002", "a padded graph reads rows of an earlier batch",
        tests=(
            "test_vllm_card.py::test_every_step_of_a_size_has_the_addresses_of_its_capture",
            "gpu/check_graphs.py::padded",
            "gpu/check_vllm.py::graphs",
        ),
    ),
    Case(
        35, "UniRL#208", "every sample of a group has the same seed",
        tests=("test_sampling.py::test_a_group_of_samples_differs_and_the_same_seeds_repeat_it",),
    ),
    Case(
        36, "Megatron#7513", "local token counts bias the loss under CP",
        ("cpu/ws2/tp1cp8/tiny-short/loss", "cpu/ws2/tp1cp8/tiny-short/gradients"),
        ("test_train_loss.py::test_normalisation_counts_the_whole_batch_not_the_micro_batch",),
    ),
    Case(
        37, "verl#7704", "another library replaces an operator, unnoticed",
        _ws1("silu", "short", _FORWARD),
        ("test_gate_attacks.py::test_attack[forged kernel id]", "test_gate_attacks.py::test_attack[missing read-back]"),
    ),
    Case(
        38, "ProgramBench#64", "one pass in three attempts counts",
        tests=("test_gate_attacks.py::test_attack[rerun plugin]", "test_gate_attacks.py::test_attack[rerun by a hook]"),
    ),
    Case(
        39, "xdist#1386", "groups of a scheduler are ignored",
        tests=("test_cases.py::test_no_cell_depends_on_a_schedulers_groups",),
    ),
    Case(
        40, "upstream audit", "a required cell disappears",
        tests=tuple(
            f"test_gate_attacks.py::test_attack[{name}]"
            for name in ("module-level importorskip", "-k", "empty parametrise", "cell taken out of the tests")
        ),
    ),
)  # fmt: skip
