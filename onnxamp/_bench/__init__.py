"""Benchmarks: how fast models run beside each other, and why one is slower than it should be."""
