"""Counters on a card that a launch finds and leaves as zeros: arrivals of the programs of a step over pages, and work that was taken."""

from __future__ import annotations

import torch

COUNTERS = 1 << 14
_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def counters(device: torch.device) -> torch.Tensor:
    """Zeros [COUNTERS] int32: one tensor for each stream, and one for all graphs of a device.

    Graphs of one device must therefore not replay at the same time. A captured call needs one call of any attention before it.
    """
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    captured = torch.cuda.is_current_stream_capturing()
    key = (device, -1 if captured else torch.cuda.current_stream(device).cuda_stream)
    found = _counters.get(key)
    if found is None:
        if captured:
            raise RuntimeError("attention: call it once before a graph is captured, so that its counters exist outside the graph")
        for name in (key, (device, -1)):
            _counters.setdefault(name, torch.zeros(COUNTERS, dtype=torch.int32, device=device))
        found = _counters[key]
    return found
