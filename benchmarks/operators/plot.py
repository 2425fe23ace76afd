"""Draws the operators' times over those of the default operators, from the recorded results: one row per operator, one dot per size.

python benchmarks/operators/plot.py          (writes benchmarks/results/operators.svg)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from rlk.contract.numerics import HOPPER

RESULTS = Path(__file__).resolve().parents[1] / "results"
OURS = f"{HOPPER.kv_tile}/{HOPPER.kv_split}"
"""The arm of attention that has the splits of a run on Hopper."""


@dataclass
class Operator:
    """peer: the default operator. target: the ratio that is aimed at. sizes, ratios: rows, or keys, and time over the peer's."""

    name: str
    peer: str
    target: float
    sizes: list[int] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}_h200.json").read_text())
    return found


def _products() -> Iterator[tuple[str, str, float, int, float]]:
    """(operator, peer, target, size, ratio)"""
    split = ("o_proj", "down_proj")
    for case, row in _read("det_gemm")["times"].items():
        layer, kind, rows = re.fullmatch(r"(\S+) (.+) (\d+)", case).groups()  # type: ignore[union-attr]
        if "ratio" in row and "/" not in layer:
            target = 1.1 if kind == "weight gradient" or (layer in split) == (kind == "forward") else 1.03
            yield f"{layer}, {kind}", "cuBLAS", target, int(rows), row["ratio"]


def _attention() -> Iterator[tuple[str, str, float, int, float]]:
    found = _read("attention")
    parts = (
        ("decode_us", OURS, "FlashAttention 3", 1.05), ("prefill_us", OURS, "FlashAttention 3, one split", 1.05),
        ("backward_us", "rlk", "sdpa", 1.3),
    )  # fmt: skip
    for part, ours, peer, target in parts:
        for case, arms in found[part].items():
            kind, first, _, second, *to = case.split()  # lengths of a step's sequences: one, or from … to
            mixed = ", mixed lengths" if to else ""
            name = f"attention, {kind}, {first} sequences{mixed}" if kind == "decode" else f"attention, {kind}"
            keys = int([second, *to][-1] if kind == "decode" else first)
            if ours in arms and peer in arms:
                yield name, {"sdpa": "SDPA"}.get(peer, peer), target, keys, arms[ours]["median_us"] / arms[peer]["median_us"]


def _rows() -> Iterator[tuple[str, str, float, int, float]]:
    for case, row in _read("operators")["times"].items():
        name, tokens = case.rsplit(" ", 1)
        yield (
            name,
            {"compiled": "torch.compile"}.get(row["default"], "torch"),
            1.4 if name.startswith("head") else 1.0,
            int(tokens),
            row["ratio"],
        )


def _sampling() -> Iterator[tuple[str, str, float, int, float]]:
    for case, row in _read("sampling")["times"].items():
        if (found := re.fullmatch(r"sampling (\d+) rows normal", case)) and "top_p" in row:
            yield "top-p draw and logp", "torch", 1.0, int(found[1]), row["top_p"]["median_us"] / row["torch top_p"]["median_us"]


def operators() -> list[Operator]:
    """Every operator that has a result, its sizes ascending."""
    rows: dict[str, Operator] = {}
    points = [*_products(), *_attention(), *_rows(), *_sampling()]
    for name, peer, target, size, ratio in sorted(points, key=lambda point: point[3]):
        row = rows.setdefault(name, Operator(name, peer, target))
        row.sizes.append(size)
        row.ratios.append(ratio)
    return [rows[name] for name in dict.fromkeys(point[0] for point in points)]


def draw(rows: list[Operator]) -> Figure:
    """Ratios from left to right on a logarithmic axis, the larger the dot the larger the size; a tick marks the target."""
    figure = Figure(figsize=(9, 0.27 * len(rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for place, row in enumerate(rows):
        area = [8 + 5 * size.bit_length() for size in row.sizes]
        missed = [ratio > row.target for ratio in row.ratios]
        colours = ["tab:red" if miss else "tab:blue" for miss in missed]
        axes.scatter(row.ratios, [place] * len(row.ratios), s=area, c=colours, alpha=0.6, linewidths=0)
        axes.plot([row.target] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    sizes = [f"{min(r.sizes)}" if len(set(r.sizes)) == 1 else f"{min(r.sizes)} … {max(r.sizes)}" for r in rows]
    axes.set_yticks(range(len(rows)), [f"{row.name} ({size}) / {row.peer}" for row, size in zip(rows, sizes, strict=True)], fontsize=7)
    axes.set_xscale("log", base=2)
    ticks = [0.0625, 0.125, 0.25, 0.5, 1, 1.5, 2, 3]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
    axes.minorticks_off()
    axes.axvline(1, color="grey", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_ylim(len(rows) - 0.3, -0.7)
    axes.set_xlabel("time over that of the default operator, NVIDIA H200; larger dots are larger sizes, | is the target", fontsize=8)
    return figure


if __name__ == "__main__":
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rlk"})
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "operators.svg"
    draw(operators()).savefig(to, metadata={"Date": None})
