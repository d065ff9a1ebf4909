"""What a target makes of a graph: the types of its kernels, those that are wrong, optimizers that break it."""
