"""How a token is drawn, and at which temperature its logprob is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlk.contract.numerics import ContractError, round_fp32

SMALLEST_TEMPERATURE = 0.01
"""vLLM raises smaller positive temperatures to this value without saying so in its outputs, so they are refused here."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; every value is checked at construction (ContractError).

    temperature: logits are divided by it once; 0 is greedy. top_p: kept probability mass in (0, 1]. top_k: kept ids, -1 keeps all.
    max_tokens: most response tokens. seed: key of the counter generator, together with the position.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(round_fp32(self.temperature)) or self.temperature < 0:
            raise ContractError(f"temperature={self.temperature} is not a finite fp32 number >= 0: use 0 for greedy")
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            raise ContractError(f"temperature={self.temperature} would be raised to {SMALLEST_TEMPERATURE} by the engine: use 0 for greedy")
        if not 0 < self.top_p <= 1:
            raise ContractError(f"top_p={self.top_p} is outside (0, 1]: use 1 to keep every token")
        if self.top_k != -1 and self.top_k < 1:
            raise ContractError(f"top_k={self.top_k} is neither -1 nor >= 1: use -1 to keep every token")
        if self.max_tokens < 1:
            raise ContractError(f"max_tokens={self.max_tokens} asks for no token: use 1 or more")
        if not 0 <= self.seed < 2**63:
            raise ContractError(f"seed={self.seed} does not fit a non-negative int64: use 0 … 2**63 - 1")

    @property
    def greedy(self) -> bool:
        """The largest logit wins; nothing is drawn."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """The support of a token may be smaller than the vocabulary, so the retained ids must travel with it."""
        return not self.greedy and (self.top_p < 1 or self.top_k > 0)

    @property
    def scoring_temperature(self) -> float:
        """Divisor of the logits in the logprob: 1 for greedy sampling."""
        return 1.0 if self.greedy else self.temperature
