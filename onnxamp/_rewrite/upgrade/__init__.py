"""Upgrades of models to newer opsets, op by op, with the rules of ``_data/upgrades.toml`` for each step."""
