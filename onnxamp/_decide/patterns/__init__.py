"""Nodes that belong together: decomposed ops, and what runtimes fuse."""
