"""Batch conversion: a whole folder of models in worker processes, where no model can break another."""
