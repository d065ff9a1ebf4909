"""Every option refuses values that mean nothing, by an error of the package."""

from dataclasses import fields

import pytest

import onnxamp
from onnxamp import Options

MEANINGLESS = [object(), float("nan"), -3, [object()], {1: 2}]


@pytest.mark.parametrize("name", [item.name for item in fields(Options)])
def test_meaningless_values_are_refused(name: str) -> None:
    for value in MEANINGLESS:
        with pytest.raises((onnxamp.ArgumentError, onnxamp.ArgumentTypeError)):
            Options(**{name: value})  # type: ignore[arg-type] # they are wrong
