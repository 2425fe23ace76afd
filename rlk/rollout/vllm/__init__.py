"""vLLM as a rollout engine: the stock engine, or the same engine with the contract's model, attention and sampler."""
