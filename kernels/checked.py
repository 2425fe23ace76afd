"""Facts about a tensor's values that make the host wait for the device: learned once per tensor and content."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

_known = WeakIdKeyDictionary()  # tensor → (version, {facts: value})
_trusted: set[object] = set()  # one for each open context of trust


@contextmanager
def trusted() -> Iterator[None]:
    """No check of a card's tensors runs in this process inside, on no thread, since torch's backward pass has its own: the caller refused
    wrong values where they came in, and its host must not wait for the device.

    A wrong value then shows as NaN, as in a captured graph.
    """
    mine = object()
    _trusted.add(mine)
    try:
        yield
    finally:
        _trusted.remove(mine)


def remembered(tensor: torch.Tensor, facts: Hashable, compute: Callable[[], T]) -> T:
    """compute(), which reads the values of ``tensor`` and whatever ``facts`` names, or on a card what it gave before.

    It is computed again once torch has written to the tensor. Inference tensors carry no version: each tensor object is read once.
    """
    if not tensor.is_cuda:
        return compute()
    version = None if tensor.is_inference() else tensor._version
    known = _known.get(tensor)
    if known is None or known[0] != version:
        known = _known[tensor] = (version, {})
    values: dict[Hashable, T] = known[1]
    if facts not in values:
        values[facts] = compute()
    return values[facts]


def check_device(op: str, **operands: torch.Tensor) -> None:
    """Raise ValueError unless all ``operands`` lie on one device: a kernel takes their addresses as they are."""
    (first, home), *others = ((name, tensor.device) for name, tensor in operands.items())
    for name, device in others:
        if device != home:
            raise ValueError(f"{op}: {name} is on {device} and {first} on {home}: move {name} to {home}")


def unread(tensor: torch.Tensor) -> bool:
    """Whether no check may read the values of ``tensor`` now: inside :func:`trusted`, and while a graph is captured, those of a card."""
    return tensor.is_cuda and (bool(_trusted) or torch.cuda.is_current_stream_capturing())


def check_once(tensor: torch.Tensor, facts: Hashable, check: Callable[[], None]) -> None:
    """Run ``check``, which raises if the values of ``tensor`` are wrong, unless it passed before.

    None runs where they are :func:`unread`. Kernels therefore never read or write outside their operands whatever the values are.
    """
    if unread(tensor):
        return
    remembered(tensor, facts, check)
