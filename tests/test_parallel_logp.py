"""logp over vocabulary shards: the parts of 1, 2, 4 and 8 ranks join to the bytes of the whole, forward and backward."""

from __future__ import annotations

import pytest
import torch

from rlk.contract.numerics import padded_vocab_size
from rlk.evidence.bytes import compare, describe
from rlk.kernels.logp import logp_with_lse, support_mask
from rlk.kernels.logp.shards import Columns, gradient, join, part

ROWS = 13


def draw(vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(ROWS, padded_vocab_size(vocab, 8), generator=generator) * 4
    ids = torch.randint(0, vocab, (ROWS,), generator=generator)
    return logits, ids, torch.rand(ROWS, generator=generator) + 0.5, torch.randn(ROWS, generator=generator)


def supports(kind: str, ids: torch.Tensor, vocab: int) -> torch.Tensor | None:
    """full: every column; narrow: the selected id and its neighbour, so that most shards are empty; mixed: some rows of each."""
    if kind == "full":
        return None
    rows = [None if kind == "mixed" and i % 3 == 0 else sorted({int(t), (int(t) + 1) % vocab}) for i, t in enumerate(ids)]
    return support_mask(rows, vocab, width=padded_vocab_size(vocab, 8))


@pytest.mark.parametrize("kind", ["full", "narrow", "mixed"])
@pytest.mark.parametrize("vocab", [260, 8 * 1500, 5000])
def test_parts_join_to_the_whole(vocab: int, kind: str) -> None:
    logits, ids, temperature, seed = draw(vocab)
    padded = logits.shape[1]
    support, active = supports(kind, ids, vocab), torch.arange(ROWS) % 4 != 1
    whole = logits.clone().requires_grad_()
    score, lse = logp_with_lse(
        whole, ids, temperature, vocab_size=vocab, padded_vocab=padded, vocab_tile=256, support=support, active=active
    )
    score.backward(seed)
    for ranks in (1, 2, 4, 8):
        columns = [Columns(r * padded // ranks, 8 // ranks, padded // 8, vocab) for r in range(ranks)]
        cut = [slice(c.first, c.first + c.width) for c in columns]
        held = [None if support is None else support[:, s] for s in cut]
        parts = [part(logits[:, s], ids, temperature, c, vocab_tile=256, support=h, active=active) for s, c, h in zip(cut, columns, held)]
        joined, joined_lse = join(torch.stack(parts), ids, columns[0], active=active)
        slopes = [
            gradient(logits[:, s], ids, temperature, joined_lse, seed, c, support=h, active=active) for s, c, h in zip(cut, columns, held)
        ]
        for name, actual, expected in (
            ("logp", joined, score.detach()),
            ("lse", joined_lse, lse.detach()),
            ("dlogits", torch.cat(slopes, 1), whole.grad),
        ):
            found = compare(f"{name} of {ranks} ranks", actual, expected)
            assert found.equal, describe(found)
    # Control: parts in another rank order are seen.
    assert not torch.equal(join(torch.stack(parts[::-1]), ids, columns[0], active=active)[0], score.detach())


def test_a_shard_without_support_adds_nothing() -> None:
    logits, ids, temperature, _ = draw(260)
    empty = Columns(512, 4, 128, 260)
    state = part(logits[:, 512:], ids, temperature, empty, vocab_tile=1024)
    assert empty.real == 0
    assert (state[:, 0] == -torch.inf).all()
    assert not state[:, 1:].any()


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits, ids, temperature, _ = draw(260)
    columns = Columns(0, 4, 128, 260)
    with pytest.raises(ValueError, match=r"must be float32 \[T, 512\]"):
        part(logits, ids, temperature, columns, vocab_tile=1024)
    with pytest.raises(ValueError, match="support"):
        part(logits[:, :512], ids, temperature, columns, vocab_tile=1024, support=torch.ones(ROWS, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="outside the 260 real columns"):
        join(torch.zeros(2, ROWS, 3), torch.full((ROWS,), 300), columns)
    with pytest.raises(ValueError, match="multiple of its width"):
        Columns(128, 2, 128, 260)
