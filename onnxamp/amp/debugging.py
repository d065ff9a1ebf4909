"""``import onnxamp.amp.debugging``: :mod:`onnxamp.debugging` itself."""

import sys

from onnxamp import debugging
from onnxamp.debugging import *  # noqa: F403 - for type checkers

sys.modules[__name__] = debugging
