"""rlk: trainer and rollout engine compute the same bytes, and a judge that proves it."""

__version__ = "0.1.0"
