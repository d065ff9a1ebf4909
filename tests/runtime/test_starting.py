"""What ONNX Runtime and engines say, in one line."""

import pytest

from onnxamp._runtime.sessions.starting import reason

NOT_CONVERTED = """[ONNXRuntimeError] : 11 : EP_FAIL : Check 'false' failed at src/translators/report.cpp:151:
FrontEnd API failed with OpConversionFailure:
Model wasn't fully converted. Failed operations detailed log:
-- Conv-11 with a message:
While validating ONNX node '<Node(Conv): a/b>': Check 'data.rank().is_static()' failed at src/op/conv.cpp:38:
FrontEnd API failed with GeneralFailure:
The input data tensor's rank has to be known (static)

-- ReduceMean-13 with a message:
Unsupported input type dynamic
"""
NO_PORT = """Non-zero status code while running A. Message: Exception from src/a/b.cpp:75:
Port for tensor name y was not found.
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (NOT_CONVERTED, "Conv 'a/b': The input data tensor's rank has to be known (static)"),
        (NO_PORT, "Non-zero status code while running A. Message: Port for tensor name y was not found"),
        ("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for X(7)\nmore",
         "Could not find an implementation for X(7)"),
        ("\nbad magic.\n", "bad magic"),
        ("", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(said: str, told: str) -> None:
    assert reason(said) == told
