"""``--help`` and ``--help-all``, and the rows of options that they show."""

import re
import subprocess
import sys
from dataclasses import fields
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner

from onnxamp import Options
from onnxamp._cli.command import group
from onnxamp._cli.options import SOURCES, words_of
from onnxamp._cli.summary import COMMANDS
from onnxamp._facts.devices import devices
from onnxamp._facts.dtypes import DtypeName
from onnxamp._facts.targets import targets
from onnxamp._options.command_line import OptionRow, option_rows, option_table, spelled_fields
from onnxamp._options.lists import PresetName
from onnxamp._options.options import Rounding
from onnxamp._options.values import DiffMetric, Level, LevelName
from onnxamp._runtime import BUDGET, CURE_SECONDS, LEAST, MOST
from onnxamp._tuning.metric import METRICS
from onnxamp._tuning.results import RUNS, SECONDS, TIMES, Search
from onnxamp.train._build import BOOSTS
from onnxamp.train._losses import LOSSES
from onnxamp.train._optimizers import OPTIMIZERS

DOZEN = 13
"""Options that --help shows at most; a few more than are read at a glance would hide the others."""


def shown(*words: str, columns: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(group, words)
    assert result.exit_code == 0
    return result.output


def row(command: str, flag: str) -> OptionRow:
    found = [row for row in option_rows() if command in row.commands and flag in re.split(r", |/", row.flags)]
    assert len(found) == 1, (command, flag)
    return found[0]


def flags(text: str) -> list[str]:
    """The first long flag of each option, in the order of the sections."""
    sections = re.split(r"^\S[^\n]*:$", text, flags=re.MULTILINE)[1:]
    return re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", "".join(sections), re.MULTILINE)


def headings(text: str) -> list[str]:
    return re.findall(r"^(\S[^\n]*):$", text, re.MULTILINE)


class TestHelp:
    def test_of_the_program_lists_commands_with_the_first_sentence_of_their_help(self) -> None:
        text = " ".join(shown("--help").split())
        for name, summary in COMMANDS.items():
            assert f"{name} {summary}" in text
            assert summary in " ".join(shown(name, "--help").split())

    @pytest.mark.parametrize("command", COMMANDS)
    def test_shows_a_dozen_options_in_a_line_each(self, command: str) -> None:
        text = shown(command, "--help")
        assert 1 <= len(flags(text)) - 2 <= DOZEN
        assert [line for line in text.splitlines() if len(line) > 80] == []
        assert [line for line in text.splitlines() if line.startswith("   ")] == [], "a line of its own for each"
        assert flags(text)[-2:] == ["--help-all", "--help"]
        assert "Exit codes" not in text

    @pytest.mark.parametrize("command", COMMANDS)
    def test_all_shows_each_option_once_in_the_same_order(self, command: str) -> None:
        text = shown(command, "--help-all")
        rows = [row for row in option_rows() if command in row.commands and not row.is_argument]
        assert sorted(flags(text)) == sorted(
            ["--help", "--help-all", *(row.flags.partition("/")[0].rpartition(" ")[2] for row in rows)]
        )
        assert f"Show {'everything' if len(rows) == 1 else f'all {len(rows)} options'} in full" in text
        assert "Exit codes: 0 " in text
        for item in rows:
            assert re.sub(r"\s", "", item.help) in re.sub(r"\s", "", text)
        few = shown(command, "--help")
        assert [flag for flag in flags(text) if flag in flags(few)] == flags(few)
        assert [heading for heading in headings(text) if heading in headings(few)] == headings(few)

    def test_groups_of_convert(self) -> None:
        groups = ["Result", "Precision", "Inputs and runs", "Validation", "Report", "Help"]
        assert headings(shown("convert", "--help")) == headings(shown("convert", "--help-all")) == groups

    def test_words_that_other_tables_list(self) -> None:
        text = " ".join(shown("convert", "--help-all", columns=100).split())
        assert ", ".join(targets()) in text
        assert "transformers.js: for WebGPU" in text
        assert "{" not in text

    @pytest.mark.parametrize(
        ("words", "unneeded"),
        [
            (["--help"], {"click"}), (["--version"], {"click"}),
            (["convert", "--help"], {"numpy", "onnx"}), (["train", "--help-all"], {"numpy", "onnx"}),
        ],
    )  # fmt: skip
    def test_imports_little(self, words: list[str], unneeded: set[str]) -> None:
        """Start-up would take several times as long."""
        start = f"import sys; from onnxamp.__main__ import main\nsys.argv = {['onnxamp', *words]}\n"
        report = f"print('loaded', *({unneeded} & {{*sys.modules}}))"
        code = f"{start}try: main()\nfinally: {report}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1].strip() == "loaded"

    @pytest.mark.parametrize("words", [["--help"], ["-h"], ["--version"]])
    def test_is_the_same_without_click(self, words: list[str]) -> None:
        done = subprocess.run([sys.executable, "-m", "onnxamp", *words], capture_output=True, text=True, check=True)
        assert done.stdout == shown(*words)


class TestRows:
    def test_options_that_help_shows_exist(self) -> None:
        assert [*option_table()["command"]] == [*COMMANDS]
        for command, table in option_table()["command"].items():
            names = {row.name for row in option_rows() if command in row.commands}
            assert set(table["usual"]) <= names, command

    def test_groups_are_those_of_the_table(self) -> None:
        assert {row.group for row in option_rows() if not row.is_argument} == set(option_table()["groups"])

    def test_commands_are_those_that_there_are(self) -> None:
        assert {command for row in option_rows() for command in row.commands} == set(COMMANDS)

    def test_a_command_has_no_two_options_of_a_name(self) -> None:
        for command in COMMANDS:
            names = [row.name for row in option_rows() if command in row.commands]
            assert len(names) == len(set(names)), command

    def test_all_fields_can_be_set_but_those_that_only_python_and_plans_know(self) -> None:
        others = {"level", "folded", "rescaling", "unsound", "rule", "strict_options"}
        # A new field needs a row in onnxamp/_data/options.toml, or a place among the others here.
        assert {*spelled_fields()} ^ ({item.name for item in fields(Options)} - others) == set()

    @pytest.mark.parametrize("name", spelled_fields())
    def test_defaults_are_those_of_options(self, name: str) -> None:
        spelled = spelled_fields()[name]
        default = () if spelled.repeats else spelled.meaning(spelled.default)
        assert Options.of(keywords={name: default}) == Options()

    @pytest.mark.parametrize(
        ("command", "flag", "value"),
        [
            ("convert", "--level", Options.level), ("view", "--level", Options.level),
            ("convert", "--cure-time", CURE_SECONDS), ("check", "--cure-time", CURE_SECONDS),
            ("diff", "--budget", BUDGET >> 20), ("tune", "--tolerance", Search().tolerance),
            ("tune", "--runs", RUNS), ("tune", "--times", TIMES[0]), ("tune", "--search-time", SECONDS),
            ("check", "--target", Options.target), ("diff", "--target", Options.target),
        ],
    )  # fmt: skip
    def test_other_defaults_are_those_of_the_library(self, command: str, flag: str, value: Any) -> None:
        assert row(command, flag).default == value

    @pytest.mark.parametrize(
        ("command", "flag", "words"),
        [
            ("convert", "--level", get_args(LevelName)), ("convert", "--dtype", get_args(DtypeName)),
            ("convert", "--lists", get_args(PresetName)), ("convert", "--rounding", get_args(Rounding)),
            ("convert", "--from", ("float32", *get_args(DtypeName), "auto")),
            ("convert", "--target", (*targets(), "auto")), ("convert", "--metric", get_args(DiffMetric)),
            ("tune", "--metric", ("auto", *METRICS)), ("tune", "--device", ("auto", *devices())),
            ("tune", "--times", TIMES), ("train", "--loss", (*LOSSES, "model")),
            ("train", "--optimizer", (*OPTIMIZERS,)),
            ("train", "--level", tuple(map(str, Level))), ("train", "--boost-level", BOOSTS),
            ("train", "--cast-model-type", ("float32", *get_args(DtypeName))),
        ],
    )  # fmt: skip
    def test_words_are_those_of_the_library(self, command: str, flag: str, words: tuple[str, ...]) -> None:
        assert tuple(words_of(row(command, flag))) == words

    def test_numbers_in_texts(self) -> None:
        assert f"1, or {LEAST} to {MOST} if" in row("convert", "--samples").more

    def test_every_source_of_words_is_used(self) -> None:
        assert {word for row in option_rows() for word in row.choices if word[0] == "@"} == set(SOURCES)

    @pytest.mark.parametrize(
        ("keywords", "written"),
        [
            ({"keep_io_types": False}, ["--io-types", "low"]),
            ({"keep_io_types": ["b", "a"]}, ["--io-types", "keep:a,b"]), ({"keep_io_types": ["a,b"]}, []),
            ({"hazards": False}, ["--no-hazards"]), ({"split_k": False}, ["--no-split-k"]),
            ({"fold": True}, ["--fold"]), ({"init_max": 2.5}, ["--init-max", "2.5"]),
            ({"freeze_defaults": False}, ["--keep-overridable"]), ({"opset": 18}, ["--opset", "18"]),
            ({"white_list": ["Add", "Mul"]}, ["--white", "Add", "--white", "Mul"]),
            ({"from_dtype": "bfloat16"}, ["--from", "bfloat16"]), ({"lists": "fast"}, ["--lists", "fast"]),
        ],
    )  # fmt: skip
    def test_what_is_written_means_the_same_when_it_is_read(self, keywords: dict[str, Any], written: list[str]) -> None:
        asked = Options.of(keywords=keywords)
        assert list(asked.written()) == written
        command = group.get_command(click.Context(group), "convert")
        assert command is not None
        given = command.make_context("convert", ["model.onnx", *written]).params
        meant = {name: spelled.meaning(given[name]) for name, spelled in spelled_fields().items()}
        assert Options.of(keywords=meant) == asked or not written
