"""Language models: decoders with caches, prompts for them, and how well two of them agree on texts."""
