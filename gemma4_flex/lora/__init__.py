"""LoRA over the engine: adapters, the inference copy that is refreshed in place, and the proof that nothing drifted."""
