"""Inputs of models: drawn at random to suit them, or read from files."""
