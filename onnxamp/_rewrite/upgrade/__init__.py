"""Upgrades of models to newer opsets, op by op, by what ``_data/upgrades.toml`` knows of each step."""
