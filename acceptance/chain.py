"""Every intermediate of the model over the same tokens: vLLM generating, vLLM reading them as prompts, Megatron scoring them; on a card
also other layouts of the same samples, and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlk.acceptance.cell import Cell
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.update import AdamParams, GrpoParams
from rlk.contract.workloads import WS1
from rlk.evidence.bytes import Token
from rlk.evidence.schema import Comparison
from rlk.loop.cluster import Cluster, Remote
from rlk.loop.plan import CheckpointFacts
from rlk.parallel.pool import Pool, require

TINY_PROMPTS, TINY_TOKENS = (5, 16, 33, 64, 100, 129), 24
"""Prompt lengths of the tiny model's chain: below, at and above a page, a tile, a split and the token budget of one engine step."""
LONG_PROMPT, LONG_TOKENS = 2048, 8
"""The sample of a large model's chain that fills many splits and more than one step of the engine; the others are the ws1 workload."""
SEED = 17
WORKER = Path(__file__).with_name("chain_worker.py")

Rows = Mapping[str, torch.Tensor]
"""Rows of a pass by "{sample}/{name}", and their logical positions by "{sample}/{name}.positions"."""
Sides = tuple[list[Token], torch.Tensor, list[Token], torch.Tensor]


@dataclass(frozen=True)
class Chain:
    """Passes over the same tokens, and what the trainer's process compared itself, by judgment. "decode": vLLM generating, all samples
    together; "prefill": vLLM reading the same tokens as prompts; "train": Megatron scoring. "batch_of_one", "permuted": vLLM generating
    again. engines: read-backs by side; model_hash: what both hold."""

    responses: tuple[Response, ...]
    passes: Mapping[str, Rows]
    engines: Mapping[str, Mapping[str, Any]]
    model_hash: str
    train_layouts: Mapping[str, list[Comparison]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Decoder layers whose intermediates the engine that generates kept."""
        return len({name.split(".")[1] for name in self._names() if name.startswith("layers.")})

    def pairs(self, cell: Cell) -> Iterator[tuple[str, Sides]]:
        """What a chain cell compares: per intermediate (of every layer) both sides' rows with their tokens."""
        for name in sorted(self._names()):
            if cell.subject == "rollout_layouts":
                yield name, self._sides(name, cell.judgment, "decode")
            elif name.split(".")[-1] == cell.judgment:
                other = "train" if cell.subject == "train_vs_rollout" else "prefill"
                yield name, self._sides(name, "decode", other)

    def _names(self) -> set[str]:
        return {key.partition("/")[2] for key in self.passes["decode"] if not key.endswith(".positions")}

    def _sides(self, name: str, mine: str, other: str) -> Sides:
        sides: tuple[list[Token], list[torch.Tensor], list[Token], list[torch.Tensor]] = ([], [], [], [])
        for response in self.responses:
            key = f"{response.sample_id}/{name}"
            at, rows = self.passes[mine][f"{key}.positions"], self.passes[mine][key]
            found, others = self.passes[other][f"{key}.positions"], self.passes[other][key]
            if other == "prefill":  # generated positions only: the prompt's were prefilled on both sides
                keep = (at >= len(response.prompt_ids)) & torch.isin(at, found)
                at, rows = at[keep], rows[keep]
            if name == "logp" or (name == "logits" and other == "decode"):  # of other rows only where a step happened to end
                keep = at >= len(response.prompt_ids) - 1
                at, rows = at[keep], rows[keep]
            wanted = torch.isin(found, at)
            tokens = [[(response.sample_id, int(p)) for p in places] for places in (at, found[wanted])]
            for to, add in zip(sides, (tokens[0], [rows], tokens[1], [others[wanted]])):
                to.extend(add)
        return sides[0], torch.cat(sides[1]), sides[2], torch.cat(sides[3])


def on_cpu(cluster: Cluster, checkpoint: CheckpointFacts, scratch: Path) -> Chain:
    """The tiny model in both engines of the cluster. Greedy generation, so that a prefill of the generated tokens predicts the same one."""
    rollout, train = cluster.rollout("strict"), cluster.train("strict")
    train.call("open", checkpoint.path, 8, GrpoParams(), AdamParams())
    version, served = rollout.call("open", checkpoint.path, checkpoint.positions)
    held = train.call("adopt", checkpoint.path, version)
    if held != (version, served):
        raise RuntimeError(f"the trainer holds {held}, the rollout serves {(version, served)}")
    text = b"Add step by step: 3+8+5+9\n3+8=11;11+5=16;16+9=25;#25 " * 3
    greedy = SamplingParams(temperature=0.0, max_tokens=TINY_TOKENS)
    requests = [Request(i, tuple(text[i : i + n]), greedy) for i, n in enumerate(TINY_PROMPTS)]
    responses, passes = _generated(rollout, requests, None, scratch)
    train.call("trace", requests, responses, scratch / "train.safetensors")
    scored = load_file(scratch / "train.safetensors")
    places = {f"{name}.positions": torch.arange(len(rows)) for name, rows in scored.items()}
    engines = {"rollout": rollout.call("readback"), "train": train.call("readback")}
    return Chain(responses, {**passes, "train": {**scored, **places}}, engines, str(served))


def on_card(cluster: Cluster, checkpoint: CheckpointFacts, vocabulary: int, scratch: Path, *, alone: bool = False) -> Chain:
    """A large model: vLLM of the cluster, then the trainer in a process of its own, which loads its weights before. alone: no other engine
    may be on the card, and vLLM makes room for the trainer."""
    generator = torch.Generator().manual_seed(SEED)
    shapes = [*((WS1.prompt, n - WS1.prompt) for n in WS1.lengths), (LONG_PROMPT, LONG_TOKENS)]
    requests = [
        Request(i, tuple(torch.randint(0, vocabulary, (n,), generator=generator).tolist()), SamplingParams(0.0, max_tokens=tokens))
        for i, (n, tokens) in enumerate(shapes)
    ]
    positions = [kept_positions(n + tokens) for n, tokens in shapes]
    order = [*WS1.permutation, len(shapes) - 1][::-1]
    common = {"checkpoint": str(checkpoint.path), "numerics": asdict(cluster.numerics)}
    if alone:
        cluster.stop()
    with Pool(1) as pool, ThreadPoolExecutor(1) as beside:
        loaded = beside.submit(pool.run, 1, WORKER, "load", common, timeout=600)
        rollout = cluster.rollout("strict")
        try:
            _, served = rollout.call("open", checkpoint.path, 2 * LONG_PROMPT)
            responses, passes = _generated(rollout, requests, positions[-1], scratch)
            for name, batches in (("batch_of_one", [[r] for r in requests]), ("permuted", [[requests[at] for at in order]])):
                passes[name] = {}
                for at, batch in enumerate(batches):
                    file = scratch / f"{name}-{at}.safetensors"
                    rollout.call("trace", batch, file, positions[-1])
                    passes[name].update(load_file(file))
            engines = {"rollout": rollout.call("readback")}
        finally:
            if alone:
                cluster.stop()
        job = {
            **common, "device": cluster.device, "positions": positions, "permutation": order,
            "requests": [asdict(r) for r in requests], "responses": [asdict(r) for r in responses],
            "learner": len(WS1.lengths) - 1, "out": str(scratch / "train.safetensors"),
        }  # fmt: skip
        require(loaded.result())
        (found,) = require(pool.run(1, WORKER, "chain", job, timeout=600))
    if found["model_hash"] != served:
        raise RuntimeError(f"the trainer holds {found['model_hash']}, the rollout served {served}")
    passes["train"] = load_file(scratch / "train.safetensors")
    judgments = {name: [Comparison.model_validate(c) for c in held] for name, held in found["judgments"].items()}
    return Chain(responses, passes, {**engines, "train": found["engine"]}, str(served), judgments)


def kept_positions(length: int) -> list[int]:
    """Positions of a sequence whose rows are kept: all of a short one; of a long one its beginning, both sides of every second default
    split's edge, and the end, where every earlier row has had its influence."""
    return [p for p in range(length) if p < 64 or p % 128 in (127, 0, 1) or p >= LONG_PROMPT - 16]


def _generated(
    rollout: Remote, requests: Sequence[Request], positions: Sequence[int] | None, scratch: Path
) -> tuple[tuple[Response, ...], dict[str, dict[str, torch.Tensor]]]:
    """Responses, and the rows of the passes "decode" and "prefill" at these positions (None: all)."""
    files = {name: scratch / f"{name}.safetensors" for name in ("decode", "prefill")}
    responses = rollout.call("trace", requests, files["decode"], positions)
    once = SamplingParams(temperature=0.0, max_tokens=1)
    again = [Request(r.sample_id, (*r.prompt_ids, *r.token_ids[:-1]), once) for r in responses]
    rollout.call("trace", again, files["prefill"], positions)
    return tuple(responses), {name: load_file(path) for name, path in files.items()}
