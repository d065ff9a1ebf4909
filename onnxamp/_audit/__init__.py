"""Static checks of a model: types, kernels on the target, fallbacks, Casts, hazards and weights."""
