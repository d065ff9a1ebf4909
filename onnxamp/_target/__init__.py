"""The kernels of targets, and their speed."""
