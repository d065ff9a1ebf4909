"""Names in the options of a pipeline that its models do not have."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxamp._convert.misspelt import among, misspelt, refuse
from onnxamp._decide.unmatched import Unmatched
from onnxamp._options.levels import Level
from onnxamp._pipeline.manifest import Pipeline


@dataclass(frozen=True, slots=True)
class UnmatchedNames:
    """Names in options that match nothing.

    Attributes:
        by_model: name of a model -> what would be said of those that match nothing in it.
        anywhere: those that match nothing in any model whose options hold them.
    """

    by_model: Mapping[str, frozenset[str]]
    anywhere: tuple[Unmatched, ...]


def find_unmatched(pipeline: Pipeline) -> UnmatchedNames:
    """Look for the names of all options in the models.

    Raises:
        ArgumentError: one matches nothing, and the options are strict about names.
    """
    asked = {member.name: member.asked(Level.O2, "float16") for member in pipeline.members}
    found = {member.name: misspelt(member.model, asked[member.name]) for member in pipeline.members}
    anywhere = among((asked[name], rows) for name, rows in found.items())
    if any(options.strict_options for options in asked.values()):
        refuse(anywhere)
    return UnmatchedNames({name: frozenset(one.text for one in rows) for name, rows in found.items()}, anywhere)
