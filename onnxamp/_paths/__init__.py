"""Paths of local and remote files: a URL works wherever a path does."""
