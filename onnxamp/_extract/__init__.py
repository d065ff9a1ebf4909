"""Cutting the region around a node out of a model, with what enters it: a small model that reproduces the numbers."""

from onnxamp._extract.around import extract_region
from onnxamp._extract.region import Region, save_region

__all__ = ["Region", "extract_region", "save_region"]
