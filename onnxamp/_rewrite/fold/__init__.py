"""Decomposed patterns rewritten into the one standard op that they are, exactly, before anything is decided.

The forms are data (``_data/folds.toml``); each kind has conditions of its own that a form alone cannot say.
"""

from onnxamp._rewrite.fold.fold import Selection, fold_graph
from onnxamp._rewrite.fold.search import KIND as BATCH_NORM

__all__ = ["BATCH_NORM", "Selection", "fold_graph"]
