"""Groups of numbers far below the largest of an output: judged by their own norm, blamed, and healed."""

from typing import Any

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto
from strategies.noise import LARGEST

import onnxamp
