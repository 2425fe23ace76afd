"""The ablation: parts of the model that are computed natively or by this project's operators, engine modes and arms made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Route = Literal["attention", "ffn", "logp"]
Side = Literal["train", "rollout"]
Mode = Literal["native", "logp", "ffn", "ffn+logp", "attention", "attention+logp", "attention+ffn", "strict"]
"""What an engine computes with: "strict" is the one forward pass of this project, "native" the stock engine, and the others the stock model
in which the named routes run this project's operators."""

ROUTES: tuple[Route, ...] = ("attention", "ffn", "logp")
"""Parts of the model that an arm switches one by one; together they are everything behind the embedding, whose rows are only copied.

attention: the norm before it, qkv, q/k norm, rope, attention, o_proj. ffn: the norm before it, gate_up, SwiGLU, down_proj.
logp: final norm, lm_head, temperature, log-sum-exp, and in a rollout the draw. A residual sum belongs to the norm that reads it.
"""
MODES: tuple[Mode, ...] = ("native", "logp", "ffn", "ffn+logp", "attention", "attention+logp", "attention+ffn", "strict")
"""M000 … M111 in this order."""
MIXED_MODES: tuple[Mode, ...] = MODES[1:-1]


def routes_of(mode: Mode) -> tuple[Route, ...]:
    """The routes that run this project's operators in an engine of this mode."""
    return ROUTES if mode == "strict" else tuple(route for route in ROUTES if route in mode.split("+"))


@dataclass(frozen=True)
class Arm:
    """One ablation arm; each route names its operators as train/rollout, P native and R rlk."""

    name: str
    attention: str
    ffn: str
    logp: str

    @property
    def must_be_zero(self) -> bool:
        """Every route is rlk on both sides: one differing byte fails."""
        return all(route == "R/R" for route in (self.attention, self.ffn, self.logp))

    @property
    def must_differ(self) -> bool:
        """Every route is native on both sides: zero differing tokens mean that the detector is broken."""
        return all(route == "P/P" for route in (self.attention, self.ffn, self.logp))

    def mode(self, side: Side) -> Mode:
        """What the engine of a side computes with."""
        at = 0 if side == "train" else 2
        own = tuple(route for route, named in zip(ROUTES, (self.attention, self.ffn, self.logp)) if named[at] == "R")
        return next(mode for mode in MODES if routes_of(mode) == own)


def _arms() -> Iterator[Arm]:
    for bits in range(8):
        routes = ["R/R" if bits >> shift & 1 else "P/P" for shift in (2, 1, 0)]
        yield Arm(f"M{bits:03b}", *routes)
    yield Arm("mixed_PR", "P/R", "P/R", "P/R")
    yield Arm("mixed_RP", "R/P", "R/P", "R/P")
    yield Arm("G00", "P/P", "P/P", "P/P")
    yield Arm("G01", "R/R", "R/R", "R/R")


ARMS = tuple(_arms())
"""M000 … M111 switch attention, FFN and logp in this order; G00 and G01 are the launcher's native and consistency modes."""
