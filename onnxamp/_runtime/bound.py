"""Runs without copies between host and device: inputs and outputs are bound to the session's memory."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from onnxamp._errors import RuntimeFailure
from onnxamp._runtime.session import Provider, memory_of, short_provider, stays_on_device
from onnxamp._runtime.starting import failed, session_failures
from onnxamp._runtime.values import Feed, as_typed, to_value

if TYPE_CHECKING:
    import onnxruntime as ort


def bind(
    session: "ort.InferenceSession", feeds: Mapping[str, Feed], graph: int | None = None
) -> Callable[[], None]:
    """A function that runs the session on these inputs and returns when the device is done.

    Inputs are copied to the device once, here. Outputs go into buffers that a first run, also here, allocates. On CPU
    the arrays are used in place.

    Args:
        feeds: by input name: arrays or lists of arrays, floats of any width.
        graph: number of the CUDA graph that the second run records and later ones replay, for sessions made with
            ``enable_cuda_graph``. None for ordinary runs.

    Raises:
        RuntimeFailure: an input does not fit, the first run fails, or a CUDA graph cannot be recorded.
    """
    import onnxruntime as ort  # noqa: PLC0415

    device = "cuda" if short_provider(session.get_providers()[0]) == "CUDA" else "cpu"
    kinds = {item.name: item.type for item in session.get_inputs()}
    held = {
        name: to_value(as_typed(feed, kinds[name]), kinds[name])
        for name, feed in feeds.items()
        if name in kinds
    }
    made = {item.name: item.type for item in session.get_outputs()}
    with session_failures("run the model with its inputs and outputs bound"):
        binding = session.io_binding()
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        for name, kind in made.items():
            binding.bind_output(name, device if stays_on_device(kind) else "cpu")
        session.run_with_iobinding(binding, None if graph is None else _options(ort, -1))
        buffers = {}
        if not any(
            kind.startswith("optional(") for kind in made.values()
        ):  # to ask for an empty one would crash
            buffers = dict(zip(made, binding.get_outputs(), strict=True))
        if buffers and all(value.is_tensor() for value in buffers.values()):
            binding.clear_binding_outputs()
            for name, value in buffers.items():
                binding.bind_ortvalue_output(name, value)
    if graph is not None and not all(map(stays_on_device, made.values())):
        raise RuntimeFailure("A CUDA graph needs outputs that are tensors of numbers.")
    options = None if graph is None else _options(ort, graph)

    def run(_held: Any = (held, buffers)) -> None:  # keeps arrays and buffers alive
        try:  # which takes no time where nothing fails
            session.run_with_iobinding(binding, options)
        except Exception as error:
            raise failed("run the model again", error) from error

    if graph is not None:
        with session_failures("record a CUDA graph"):
            session.run_with_iobinding(binding, options)
    return run


def bind_values(
    session: "ort.InferenceSession",
    inputs: "Mapping[str, ort.OrtValue]",
    outputs: "Mapping[str, ort.OrtValue]",
    graph: int | None = None,
) -> Callable[[], None]:
    """A function that runs the session from buffers into buffers and returns when the device is done.

    Args:
        inputs, outputs: by name, in the session's memory; outputs must not share buffers with inputs.
        graph: as for :func:`bind`, but the first call records, after warm-up runs.

    Raises:
        RuntimeFailure: a buffer does not fit; when called, a node failed, or a CUDA graph cannot be recorded.
    """
    import onnxruntime as ort  # noqa: PLC0415

    options = None if graph is None else _options(ort, graph)
    with session_failures("bind the model's inputs and outputs"):
        binding = session.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)

    def run(_held: Any = (inputs, outputs)) -> None:
        with session_failures("run the model with its inputs and outputs bound"):
            session.run_with_iobinding(binding, options)

    return run


def empty_value(like: NDArray[Any], provider: Provider) -> "ort.OrtValue":
    """A buffer for arrays of the same shape and dtype where the provider's sessions leave their results."""
    import onnxruntime as ort  # noqa: PLC0415

    return ort.OrtValue.ortvalue_from_shape_and_type(like.shape, like.dtype, memory_of(provider), 0)


def _options(ort: Any, graph: int) -> Any:
    """Run options with the number of a CUDA graph; -1 for none."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
