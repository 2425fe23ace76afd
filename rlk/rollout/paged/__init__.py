"""A small paged rollout engine of tensor and context parallel ranks: a test bench for topologies that vLLM cannot run here."""
