"""Options of other tools, typed here: the error names what takes their place."""

import re

import click
import pytest
from commands import run

from onnxamp._cli.command import group
from onnxamp._facts.tables import read_table

TOOLS = read_table("other_tools")
OPTIONS = sorted({name for tool in TOOLS.values() for name in tool["options"]})


def flags(command: str) -> set[str]:
    found = group.get_command(click.Context(group), command)
    assert found is not None
    return {flag for option in found.params for flag in (*option.opts, *option.secondary_opts)}


@pytest.mark.mostly_slow(fast=50)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("spelled", ["{}", "{}=value"])
def test_each_is_wrong_usage_with_what_takes_its_place(name: str, spelled: str) -> None:
    result = run("convert", "model.onnx", spelled.format(name), "value")
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    owners = [tool for tool, row in TOOLS.items() if name in row["options"]]
    assert all(f"{tool}'s" in told for tool in owners)
    assert name in told
    meaning = TOOLS[owners[0]]["options"][name]
    assert meaning.removeprefix("nothing") in told


def test_what_takes_their_place_exists() -> None:
    """But for flags of the tool itself that the text speaks of."""
    ours = flags("convert") | flags("tune")
    for tool in TOOLS.values():
        assert tool["source"]
        for meaning in tool["options"].values():
            assert set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", meaning)) <= ours | tool["options"].keys()


def test_none_is_an_option_of_ours() -> None:
    assert not flags("convert").intersection(OPTIONS)


def test_whose_it_is_if_several_tools_have_it() -> None:
    said = "onnxconverter-common's and ONNX Runtime's --op_block_list is onnxamp's --black OP"
    assert said in " ".join(run("tune", "model.onnx", "--op_block_list", "Softmax").stderr.split())


def test_other_unknown_options_are_told_as_before() -> None:
    result = run("convert", "model.onnx", "--onnxpath", "x")
    assert result.exit_code == 2
    assert "No such option" in result.stderr
