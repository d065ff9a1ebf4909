"""Paths of files, here and elsewhere: a URL is as good as a path."""
