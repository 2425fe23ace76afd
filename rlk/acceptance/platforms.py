"""The platforms, and which of them this machine can run. Cheap to import: torch is loaded only to answer."""

from __future__ import annotations

import os
from typing import Literal

Platform = Literal["cpu", "cuda", "rocm"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "rocm")
VISIBLE: dict[Platform, tuple[str, ...]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
"""The variables that name the cards of a process; the first that is set counts, and engines refuse two that differ."""


def own_card_first(platform: Platform, worker: int) -> None:
    """Give each of several test processes another first card, which cells of one card run on; those of several see all.

    Before this process has used a card: the order is read once.
    """
    import torch

    named = next((os.environ[name] for name in VISIBLE[platform] if name in os.environ), None)
    cards = list(map(str, range(torch.cuda.device_count()))) if named is None else named.split(",")
    first = worker % max(1, len(cards))
    os.environ.update(dict.fromkeys(VISIBLE[platform], ",".join(cards[first:] + cards[:first])))


def why_not_here(platform: Platform) -> str:
    """Empty if the platform's cells can run here, else one sentence that names what is missing and the remedy."""
    if platform == "cpu":
        return ""
    import torch

    built_for_rocm = torch.version.hip is not None
    if not torch.cuda.is_available() or built_for_rocm != (platform == "rocm"):
        card = "an H100-class CUDA card" if platform == "cuda" else "an MI300X (gfx942) with ROCm"
        return f"-m {platform} needs {card} and a matching torch build, which this machine lacks: run `pytest -m cpu acceptance/` here"
    if platform == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        return f"-m cuda is defined for sm_90, this card is sm_{''.join(map(str, torch.cuda.get_device_capability()))}: use an H100 or H200"
    return ""
