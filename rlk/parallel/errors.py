"""What can go wrong between ranks. Each error is raised on every rank that takes part."""

from __future__ import annotations


class ParallelError(RuntimeError):
    """Base of this package's errors."""


class MismatchError(ParallelError):
    """Ranks ask for different things; the message says which rank asks for what."""


class PeerLostError(ParallelError):
    """A rank died, left or does not answer; the message names it."""


class PeerFailedError(ParallelError):
    """Another rank raised in a step that all ranks take together; the message carries its words."""
