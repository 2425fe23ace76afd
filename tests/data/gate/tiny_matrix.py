"""A matrix of three required cells, one of each kind, and one that is unsupported."""

from rlk.acceptance.cell import Cell


def cells(platform):
    strict = (("train", "rms_norm"), ("rollout", "rms_norm"))
    return (
        Cell(platform, "chain", "train_vs_rollout", "tiny", "logp", strict=strict, facts=("rollout_engine",)),
        Cell(platform, "ablation", "G00", "tiny", "logprob", expect="different", native=("train", "rollout")),
        Cell(platform, "control", "flipped_bit", "tiny", "caught", expect="caught"),
        Cell(platform, "chain", "prefill_vs_decode", "tiny", "logp", unsupported="one engine only"),
    )
