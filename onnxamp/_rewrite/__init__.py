"""From a decision to a model: the rewrite plan, and the one place that applies it."""
