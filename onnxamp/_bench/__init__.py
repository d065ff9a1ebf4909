"""Benchmarks: how fast models run side by side, and why one is slower than it should be."""
