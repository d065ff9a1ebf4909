"""Running models: sessions and providers, inputs, and float32 emulation of low precision."""
