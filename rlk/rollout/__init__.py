"""Rollout engines, one adapter each, and the strict sampler they share."""
