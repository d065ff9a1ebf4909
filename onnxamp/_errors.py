"""Every error that onnxamp raises on purpose.

    OnnxAmpError
    ├── ArgumentError (ValueError)         an argument has an impossible value
    │   └── ContradictionError             two wishes of the user exclude each other
    ├── ArgumentTypeError (TypeError)      an argument has the wrong type
    ├── ModelError                         the model cannot be read, or is not valid
    │   ├── ExternalDataError              its weights are missing, or lie where they must not
    │   └── OpsetError                     its opset is too old (or too new) for the wish
    ├── GradientError                      a loss cannot be differentiated: an op on the way has no rule
    ├── OutputError                        the result cannot be written
    ├── RuntimeFailure                     ONNX Runtime could not load or run a model
    ├── NumericsError                      a value that was checked holds NaN or Inf
    └── InternalError                      a promise of onnxamp was about to be broken: a bug

Each message names what, where and what to do. Nothing on disk is harmed when one of them is raised.
"""


class OnnxAmpError(Exception):
    """Root of all errors raised by onnxamp."""


class ArgumentError(OnnxAmpError, ValueError):
    """An argument has a value that onnxamp does not know, or that makes no sense here."""


class ContradictionError(ArgumentError):
    """Two wishes of the user exclude each other; the message names both."""


class ArgumentTypeError(OnnxAmpError, TypeError):
    """An argument is of a type that the function does not take."""


class ModelError(OnnxAmpError):
    """The model cannot be read, or breaks a rule of ONNX that onnxamp depends on."""


class ExternalDataError(ModelError):
    """Weights stored outside the model file are missing, too short, or outside the model's folder."""


class OpsetError(ModelError):
    """The model's opset does not know the wanted type, or the installed onnx does not know the opset."""


class GradientError(OnnxAmpError):
    """A loss cannot be differentiated: the message names the op between it and a weight that has no rule, or why."""


class OutputError(OnnxAmpError):
    """The result cannot be written; what was there before is untouched."""


class RuntimeFailure(OnnxAmpError):  # noqa: N818 - "error" would say that onnxamp itself is at fault
    """ONNX Runtime could not load a model, or failed while it ran."""


class NumericsError(OnnxAmpError):
    """A value that was checked holds NaN or Inf; raised where a check is told to abort.

    ``value``, ``node`` and ``op`` name it, the node that makes it (its first output where it has no name) and its op
    type; a tensor or an input of the model has no node.
    """

    def __init__(self, message: str, value: str = "", node: str = "", op: str = "") -> None:
        super().__init__(message)
        self.value = value
        self.node = node
        self.op = op


class InternalError(OnnxAmpError):
    """onnxamp was about to break one of its own promises; please report the model."""


for _error in [value for value in list(globals().values()) if isinstance(value, type)]:
    _error.__module__ = "onnxamp"  # where users import them from, as tracebacks show
