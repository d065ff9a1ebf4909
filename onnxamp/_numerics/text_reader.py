"""What a comparison needs to know of models that read texts. The room for language models provides it."""

from collections.abc import Iterator
from typing import Protocol

from onnxamp._base.extensions import extensions
from onnxamp._model.model import Model
from onnxamp._numerics.differences.metrics import Perplexity
from onnxamp._numerics.results import Parting
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.sessions.values import Feeds


class TextReader(Protocol):
    """Compares two models that read texts, a reference and a result with the same inputs."""

    def defined(self, feeds: Feeds, outputs: Outputs) -> Outputs:
        """Return outputs with zeros for the elements that engines leave undefined."""

    def perplexity(
        self, feeds: Feeds, reference: Outputs, result: Outputs
    ) -> Perplexity | None:
        """Measure how well both models predict the tokens of a sample.

        Returns:
            None if no token of the sample follows another, or there are no logits for each of them.
        """

    def generated(
        self,
        models: tuple[Session, Session],
        feeds: Feeds,
        outputs: tuple[Outputs, Outputs],
        *,
        most: int,
        sample: int,
    ) -> Iterator[Parting]:
        """Generate tokens with both models after a sample, if it is a prompt, for as long as both choose the same.

        Args:
            models: the reference and the result.
            feeds: the sample.
            outputs: the outputs of both for it.
            most: the largest number of tokens.
            sample: the number of the sample.

        Raises:
            RuntimeFailure: the result does not run where the reference does.
        """


def text_reader(model: Model, generates: int) -> TextReader | None:
    """Return what compares models with these inputs and outputs on texts; None if they read none.

    Args:
        model: the reference.
        generates: the number of tokens to generate after a prompt.
    """
    graph = model.proto.graph
    inputs = {entry.name for entry in graph.input}
    offer = extensions("comparisons")["texts"]
    if not offer.is_for(inputs, {entry.name for entry in graph.output}):
        return None
    reader: TextReader | None = offer.load().reader_of(model, generates)
    return reader
