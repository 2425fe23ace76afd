"""``rlk prepare --tiny``: a small real checkpoint, warmed up on the bundled arithmetic until its rewards differ between samples.

Random weights would earn the same reward for every response and give a policy gradient of zero. The warm-up imitates worked solutions
into which slips are planted, so that the model samples right and wrong answers alike and a few policy-gradient steps can improve it.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from rlk.contract.models import TINY
from rlk.loop.arithmetic import TERMS, Problem, problems, worked_solution
from rlk.loop.labels import PrepareError, TinyLabel, require_new, save_labelled, shape_config
from rlk.loop.tokenizer import END, PAD, byte_tokenizer
from rlk.model.config import Qwen3Config
from rlk.model.weights import model_hash

STEPS = 260
_BATCH = 16
_LEARNING_RATE = 3e-3
_SLIP_RATE = 0.1
_IGNORED = -100


@dataclass(frozen=True)
class TinyCheckpoint:
    """A prepared checkpoint directory; final_loss is the mean cross entropy (nats per token) over the last batch."""

    path: Path
    model_hash: str
    seed: int
    steps: int
    final_loss: float


def tiny_config() -> Qwen3Config:
    """The contract's tiny model as a checkpoint configuration."""
    return shape_config(TINY)


def prepare_tiny(directory: Path, *, seed: int = 0, steps: int | None = None) -> TinyCheckpoint:
    """Train the tiny model for ``steps`` supervised updates (default :data:`STEPS`) and write it as a bf16 Hugging Face checkpoint.

    Seeded and single-threaded, so a machine repeats itself; other machines may round differently, hence rlk.json carries the hash.
    The directory appears whole or not at all. Raises PrepareError if it exists or ``steps`` is negative.
    """
    directory, steps = Path(directory), STEPS if steps is None else steps
    require_new(directory)
    if steps < 0:
        raise PrepareError(f"steps={steps} must not be negative")
    config = tiny_config()
    with _one_seeded_thread(seed):
        tensors, final_loss = _warm_up(config, seed, steps)
    label = TinyLabel(
        kind="tiny-warmed-up",
        seed=seed,
        steps=steps,
        final_loss=final_loss,
        torch_version=torch.__version__,
        model_hash=model_hash(tensors),
    )
    save_labelled(directory, config, tensors, label)
    return TinyCheckpoint(directory, label.model_hash, seed, steps, final_loss)


def _warm_up(config: Qwen3Config, seed: int, steps: int) -> tuple[dict[str, torch.Tensor], float]:
    """Supervised fp32 training on worked solutions; returns bf16 tensors by HF name and the loss of the last batch."""
    from transformers import Qwen3Config as ReferenceConfig  # seconds to import, and only this command needs it
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM(ReferenceConfig(**{k: v for k, v in config.to_dict().items() if k not in ("dtype", "torch_dtype")}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    slips, tasks, tokenizer = random.Random(f"slips {seed}"), problems(steps * _BATCH, seed), byte_tokenizer()
    final_loss = float("nan")
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * _schedule(step, steps)
        ids, targets = _batch(tasks[step * _BATCH : (step + 1) * _BATCH], slips, tokenizer)
        learned = targets != _IGNORED
        # The vocabulary projection runs on response positions only: half of the work of the full one.
        hidden = model.model(ids).last_hidden_state[learned]
        loss = cross_entropy(model.lm_head(hidden), targets[learned])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        final_loss = loss.item()
    return {name: tensor.detach().bfloat16() for name, tensor in model.state_dict().items()}, final_loss


def _schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: linear rise over the first 5 %, constant, linear fall over the last 40 %."""
    return min(1.0, (step + 1) / max(1, steps // 20), (steps - step) / max(1.0, 0.4 * steps))


def _batch(tasks: list[Problem], slips: random.Random, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and next-token targets, int64 [len(tasks), longest], padded right; only response tokens and the end token are learned."""
    rows = []
    for task in tasks:
        planted = [slips.choice((-1, 1)) if slips.random() < _SLIP_RATE else 0 for _ in range(TERMS - 1)]
        prompt, response = (tokenizer.encode(text).ids for text in (task.prompt, worked_solution(task, planted)))
        rows.append((prompt, [*response, END]))
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids, targets = torch.full((len(rows), longest), PAD), torch.full((len(rows), longest), _IGNORED)
    for row, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(response)
    return ids, targets


@contextlib.contextmanager
def _one_seeded_thread(seed: int) -> Iterator[None]:
    """Seed torch and use one thread inside; the caller's random state and thread count come back unchanged.

    The model is so small that a second thread saves little, and costs far more than it saves when another process wants the core.
    """
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
