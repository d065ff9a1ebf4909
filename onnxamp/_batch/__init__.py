"""Batch conversion of a whole folder of models in worker processes, so that no model can break another."""
