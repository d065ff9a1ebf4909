"""Models that lie, by accident or on purpose: for each, a result or one clear error, and no more memory than it has."""

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import onnx
import pytest
from commands import CLASSIFIER, is_one_sentence, run
from google.protobuf.message import DecodeError
from graphs import CASES
from graphs.case import parse
from onnx import AttributeProto, ModelProto, TensorProto, helper

import onnxamp
from onnxamp import ExternalDataError, InternalError, ModelError, OnnxAmpError, OpsetError, convert_model
from onnxamp._model.model import Model, load_model
from onnxamp._model.wellformed import MAX_NESTING, check_wellformed
from onnxamp._runtime.sessions.session import make_session
from onnxamp.debugging import InferenceSession

TEXT = "(float[2,4] X) => (float[2,4] Y) <float[4] w = {1, 2, 3, 4}> { h = Mul (X, w) Y = Cast <to = 1> (h) }"


def model_of(text: str = TEXT, **opsets: int) -> ModelProto:
    return parse(text, domains=opsets)


# --- mutated models ---------------------------------------------------------------------------------------------

MUTANTS = 2000
INTEGERS = (0, -1, 1, 3, 16, 99, 2**31 - 1, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63))
TEXTS = ("", "x", "\x1b[31m", "../../etc/passwd", "a" * 5000, "Loop", "If", "Constant", "com.microsoft")


def with_other_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes replaced, cut out, put in, repeated, cut off."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(made) or 1)
        cut = rng.randrange(1, 9)
        way = rng.randrange(6)
        if way == 0 and made:
            made[at] ^= 1 << rng.randrange(8)
        elif way == 1 and made:
            made[at] = rng.choice((0, 1, 127, 128, 255))
        elif way == 2:
            del made[at : at + cut]
        elif way == 3:
            made[at:at] = rng.randbytes(cut)
        elif way == 4:
            made[at:at] = made[at : at + 8 * cut]
        else:
            del made[max(at, 1) :]
    return bytes(made)


def messages(proto: Any) -> Iterator[Any]:
    stack = [proto]
    while stack:
        found = stack.pop()
        yield found
        for field, value in found.ListFields():
            if field.message_type is not None:
                stack += value if hasattr(value, "add") else [value]


def number(kind: int, field: Any, rng: random.Random) -> Any:
    """A number that the field takes, if not its reader."""
    if kind in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    if kind == field.TYPE_ENUM:
        return rng.randrange(-1, 30)
    chosen = rng.choice(INTEGERS)
    if kind == field.TYPE_INT32:
        return max(-(2**31), min(chosen, 2**31 - 1))
    return abs(chosen) if kind == field.TYPE_UINT64 else chosen


def with_other_fields(data: bytes, rng: random.Random) -> bytes:
    """Fields changed, left out, repeated, moved to where they fit by type alone."""
    model = ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = list(messages(model))
        target = rng.choice(every)
        field = rng.choice(list(target.DESCRIPTOR.fields))
        many = hasattr(getattr(target, field.name), "append")
        if rng.random() < 0.3:
            target.ClearField(field.name)
            continue
        if field.message_type is not None:
            donors = [item for item in every if item.DESCRIPTOR is field.message_type]
            if donors:
                copy = type(donors[0])()
                copy.CopyFrom(rng.choice(donors))
                getattr(target, field.name).append(copy) if many else getattr(target, field.name).CopyFrom(copy)
            continue
        kind = field.type
        value = rng.choice(TEXTS) if kind == field.TYPE_STRING else number(kind, field, rng)
        if kind == field.TYPE_BYTES:
            value = rng.choice((b"", b"\xff\xfe", bytes(64)))
        if not many:
            with suppress(ValueError):  # not a number of the enumeration
                setattr(target, field.name, value)
        elif len(getattr(target, field.name)) and rng.random() < 0.7:
            getattr(target, field.name)[0] = value
        else:
            getattr(target, field.name).append(value)
    return model.SerializePartialToString()


@pytest.fixture(scope="module")
def whole_models() -> list[bytes]:
    return [case.build().SerializeToString() for case in CASES.values()]


@pytest.mark.slow
@pytest.mark.parametrize("mutate", [with_other_bytes, with_other_fields])
def test_mutated_models(
    whole_models: list[bytes], mutate: Callable[[bytes, random.Random], bytes], tmp_path: Path
) -> None:
    rng, refused = random.Random(0), 0
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    for _ in range(MUTANTS // 2):
        source.write_bytes(mutate(rng.choice(whole_models), rng))
        wishes = {"level": rng.choice(("O0", "O1", "O2", "O3")), "dtype": rng.choice(("float16", "bfloat16"))}
        try:
            onnxamp.convert_file(source, target, **wishes, target=rng.choice(("cuda", "cpu", "any")), validate=False)
            onnx.load(target)
        except InternalError:
            raise
        except OnnxAmpError as error:
            refused += 1
            str(error).encode()
    assert MUTANTS // 20 < refused < MUTANTS // 2


COMMANDS = {
    "inspect": ("inspect", "--level", "O2"),
    "view": ("view",),
    "check": ("check",),
    "static": ("check", "--static"),
    "convert": ("convert", "-o", "o.onnx", "--html", "r.html"),
    "diff": ("diff", CLASSIFIER),
    "tune": ("tune", "-o", "o.onnx", "--runs", "1", "--samples", "1"),
}


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_mutated_models_on_the_command_line(
    command: str, whole_models: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, name = random.Random(command), Path("m.onnx")
    for count in range(12):
        name.write_bytes((with_other_fields, with_other_bytes)[count % 2](rng.choice(whole_models), rng))
        check_end(run(COMMANDS[command][0], name, *COMMANDS[command][1:]))


def check_end(result: Any) -> None:
    """The command ended as commands do, and wrote nothing that a terminal obeys."""
    assert result.exit_code in (0, 1, 2)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    assert not set("\x1b\x07\x00\u202e") & set(result.output)


def test_every_truncation(whole_models: list[bytes]) -> None:
    data, read = whole_models[0], 0
    for end in range(len(data)):
        try:
            convert_model(ModelProto.FromString(data[:end]))
            read += 1
        except (DecodeError, OnnxAmpError):
            pass
    assert read < len(data) // 4


# --- what is no model -------------------------------------------------------------------------------------------

FILES = {
    "nothing": b"",
    "text": b"Dear Sir or Madam,\n",
    "gzip": b"\x1f\x8b\x08\x00" + bytes(60),
    "zip": b"PK\x03\x04" + bytes(60),
    "frozen graph": b"\n\x17\n\x05input\x12\x0bPlaceholder*\x01\x00" * 3,
    "noise": bytes(range(256)) * 4,
    "zeros": bytes(1000),
    "json": b'{"irVersion": "8", "layers": []}',
}


def no_files(folder: Path) -> dict[str, Path]:
    """Things that have names, but must not be read: who reads them waits, or never ends."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    huge = folder / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    return {"folder": folder / "folder", "pipe": folder / "pipe", "device": Path("/dev/zero"), "huge": huge}


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names")
@pytest.mark.parametrize("command", [*COMMANDS, "api"])
def test_what_is_no_model(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    others = no_files(tmp_path)
    for name, data in FILES.items():
        others[name] = tmp_path / f"{name}.onnx"
        others[name].write_bytes(data)
    for path in others.values():
        if command == "api":
            for read in (convert_model, onnxamp.plan_model, Model.of):
                with pytest.raises(
                    ModelError, match=r"Cannot read|not an ONNX model|no graph|is (empty|a (ZIP|compressed|Tens))"
                ):
                    read(path)
            continue
        arguments = [argument if argument != "o.onnx" else tmp_path / "o.onnx" for argument in COMMANDS[command]]
        result = run(arguments[0], path, *arguments[1:])
        check_end(result)
        is_usage = command == "convert" and path.is_dir()  # it takes folders of models
        assert result.exit_code == (2 if is_usage or command == "diff" else 1)
        assert result.output.count("Error: ") == 1


# --- one lie at a time ------------------------------------------------------------------------------------------


def changed(change: Callable[[ModelProto], Any], text: str = TEXT, **opsets: int) -> ModelProto:
    model = model_of(text, **opsets)
    change(model)
    return model


def weight(**fields: Any) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        tensor = model.graph.initializer[0]
        tensor.Clear()
        tensor.MergeFrom(TensorProto(**({"name": "w", "data_type": TensorProto.FLOAT, "dims": [4]} | fields)))

    return change


def other(place: str, **fields: Any) -> Callable[[ModelProto], None]:
    """Change fields of the message that a dotted path names; numbers in it are positions."""

    def change(model: ModelProto) -> None:
        found: Any = model
        for step in place.split(".") if place else []:
            found = found[int(step)] if step.isdigit() else getattr(found, step)
        for name, value in fields.items():
            setattr(found, name, value)

    return change


def nested(model: ModelProto) -> None:
    """Graphs in graphs, beyond what protobuf reads."""
    graph = model.graph
    for _ in range(MAX_NESTING + 1):
        node = graph.node.add(op_type="If", input=["c"], output=["z"], name="deep")
        item = node.attribute.add(name="then_branch", type=AttributeProto.GRAPH)
        item.g.output.add(name="o")
        other_branch = node.attribute.add(name="else_branch", type=AttributeProto.GRAPH)
        other_branch.g.output.add(name="o")
        graph = item.g


def calling(model: ModelProto) -> None:
    for name, callee in (("f", "g"), ("g", "f")):
        function = model.functions.add(name=name, domain="d", input=["a"], output=["b"])
        function.opset_import.add(domain="", version=17)
        function.opset_import.add(domain="d", version=1)
        function.node.add(op_type=callee, domain="d", input=["a"], output=["b"])


def spoilt(field: str) -> Callable[[ModelProto], None]:
    """A text that is not UTF-8: nothing but parsing makes one."""

    def change(model: ModelProto) -> None:
        if field == "name":
            model.graph.node[0].name = "\x7f\x7f\x7f"
        else:
            setattr(model.graph.node[0], field, "\x7f\x7f\x7f")
        data = model.SerializeToString().replace(b"\x7f\x7f\x7f", b"\xff\xfe\xff")
        model.Clear()
        model.ParseFromString(data)

    return change


def sparse_outside(model: ModelProto) -> None:
    sparse = model.graph.sparse_initializer.add(dims=[4])
    sparse.values.MergeFrom(TensorProto(name="s", data_type=TensorProto.FLOAT, dims=[2]))
    sparse.values.data_location = TensorProto.EXTERNAL


LOOP = """(int64 M, float[2] X) => (float[2] Y) <bool go = {1}> {
    Y = Loop (M, go, X) <body = b (int64 i, bool c, float[2] p) => (bool d, float[2] q) {
        d = Identity (c) q = Neg (p) }> }"""
LIES = {
    "no graph": (lambda m: m.ClearField("graph"), "has no graph"),
    "newer IR": (other("", ir_version=onnx.IR_VERSION + 1), rf"version {onnx.IR_VERSION + 1}.*up to {onnx.IR_VERSION}"),
    "negative IR": (other("", ir_version=-3), "-3"),
    "newer opset": (other("opset_import.0", version=99), rf"opset 99.*up to {onnx.defs.onnx_opset_version()}"),
    "negative opset": (other("opset_import.0", version=-1), "-1"),
    "opset beyond all": (other("opset_import.0", domain="x", version=2**40), "damaged"),
    "newer ml opset": (lambda m: m.opset_import.add(domain="ai.onnx.ml", version=77), r"ai\.onnx\.ml opset 77"),
    "negative dims": (weight(dims=[-4], raw_data=bytes(16)), r"'w'.*\(-4,\)"),
    "huge dims": (weight(dims=[2**62, 2**62], raw_data=bytes(16)), "'w' does not hold"),
    "nothing of a huge shape": (weight(dims=[0, 2**62, 2**62], raw_data=b""), "which is impossible"),
    "too short": (weight(raw_data=bytes(15)), "'w' does not hold the 16 bytes"),
    "too long": (weight(raw_data=bytes(17)), "'w' does not hold the 16 bytes"),
    "integers for floats": (weight(int32_data=[1, 2, 3, 4]), "in the wrong field for its type"),
    "twice": (weight(float_data=[1, 2, 3, 4], raw_data=bytes(16)), "'w' does not hold"),
    "no data": (weight(), "'w' does not hold the 4 elements"),
    "no element type": (weight(data_type=0), "element type 0"),
    "unknown element type": (weight(data_type=99), "element type 99"),
    "segment": (weight(raw_data=bytes(16), segment=TensorProto.Segment(begin=0, end=9)), "segment"),
    "sparse weight outside": (sparse_outside, "'s' is stored outside the model file.*load it first"),
    "declared unknown": (other("graph.input.0.type.tensor_type", elem_type=99), "element type 99"),
    "no type": (lambda m: m.graph.input[0].ClearField("type"), "'X' has no type"),
    "no element type of an input": (other("graph.input.0.type.tensor_type", elem_type=0), "'X' has no type"),
    "attribute of no type": (other("graph.node.1.attribute.0", type=0), "type 0"),
    "attribute of unknown value": (other("graph.node.1.attribute.0", type=AttributeProto.TENSOR), "holds i"),
    "attribute of wrong type": (
        lambda m: m.graph.node[1].attribute[0].CopyFrom(helper.make_attribute("to", "float")), "requires INT"),
    "attribute twice": (lambda m: m.graph.node[1].attribute.append(m.graph.node[1].attribute[0]), "two attributes"),
    "attribute missing": (lambda m: m.graph.node[1].ClearField("attribute"), "lacks the attribute 'to'"),
    "attribute unknown": (other("graph.node.1.attribute.0", name="two"), "'two', which its schema lacks"),
    "attribute of a function": (other("graph.node.1.attribute.0", ref_attr_name="a"), "refers to an attribute"),
    "no op type": (other("graph.node.0", op_type=""), "no op type"),
    "no input": (lambda m: m.graph.node[0].ClearField("input"), "at least 2"),
    "too many inputs": (lambda m: m.graph.node[0].input.append("X"), "at most 2"),
    "no output": (lambda m: m.graph.node[0].ClearField("output"), "at least 1"),
    "input left out": (lambda m: m.graph.node[0].input.__setitem__(0, ""), "lacks input 0, 'A'"),
    "unknown input": (lambda m: m.graph.node[0].input.__setitem__(0, "q"), "'q', which nothing defines"),
    "name twice": (lambda m: m.graph.node[1].output.__setitem__(0, "h"), "'h' is defined twice"),
    "cycle": (lambda m: m.graph.node[0].input.__setitem__(0, "Y"), "cyclic"),
    "no such output": (other("graph.output.0", name="nothing"), "Nothing produces the output"),
    "name in no UTF-8": (spoilt("name"), "not UTF-8"),
    "op in no UTF-8": (spoilt("op_type"), "not UTF-8"),
    "domain in no UTF-8": (spoilt("domain"), "not UTF-8"),
    "deep": (nested, "more than 32 deep"),
    "calls itself": (calling, "calls itself"),
}  # fmt: skip


IN_ROW = "t = d.fNEXT (x) y = d.fNEXT (t)"
IN_BRANCHES = """c = Constant <value = bool {1}> ()
    y = If (c) <then_branch = t () => (float[2] a) { a = d.fNEXT (x) },
                else_branch = e () => (float[2] b) { b = d.fNEXT (x) }>"""


def doubling(depth: int, twice: str = IN_ROW) -> ModelProto:
    """A model whose functions call the next one twice each."""
    bodies = [twice.replace("NEXT", str(number + 1)) for number in range(depth - 1)] + ["y = Neg (x)"]
    functions = [
        f'<domain: "d", opset_import: ["": 17, "d": 1]> f{number} (x) => (y) {{ {body} }}'
        for number, body in enumerate(bodies)
    ]
    main = '<ir_version: 9, opset_import: ["": 17, "d": 1]> g (float[2] X) => (float[2] Y) { Y = d.f0 (X) }'
    return onnx.parser.parse_model("\n".join([main, *functions]))


AMOUNTS = {25: f"{2**24:,}", 41: f"{2**40:,}", 5000: f"more than {10**15:,}"}
"""Depth -> what is said of the nodes."""


@pytest.mark.slow
@pytest.mark.parametrize("depth", AMOUNTS)
def test_functions_that_grow_beyond_measure_are_refused_before_they_are_inlined(depth: int, tmp_path: Path) -> None:
    model = doubling(depth)
    for convert in (convert_model, onnxamp.plan_model, Model.of):
        with pytest.raises(ModelError, match=f"{AMOUNTS[depth]} nodes once their calls are inlined.*'d::f0'"):
            convert(model)
    onnx.save(model, tmp_path / "m.onnx")
    for command in ("inspect", "check", "bench"):
        assert is_one_sentence(run(command, tmp_path / "m.onnx"))


def test_calls_in_branches_count() -> None:
    with pytest.raises(ModelError, match="nodes once their calls are inlined"):
        convert_model(doubling(25, IN_BRANCHES))


def test_functions_that_are_called_often_are_fine() -> None:
    model = doubling(10)
    assert len(convert_model(model, "O3").graph.node) >= 2**9


@pytest.mark.parametrize("lie", LIES)
def test_lies(lie: str) -> None:
    change, said = LIES[lie]
    for convert in (convert_model, onnxamp.plan_model, Model.of if lie not in STRUCTURE else convert_model):
        with pytest.raises(ModelError, match=said) as caught:
            convert(changed(change))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lie", [lie for lie in LIES if "'w'" in LIES[lie][1]])
def test_a_lie_about_a_weight_beside_a_sound_one_of_its_form(lie: str) -> None:
    change, said = LIES[lie]
    model = changed(change)
    model.graph.initializer.insert(0, helper.make_tensor("v", TensorProto.FLOAT, [4], bytes(16), raw=True))
    with pytest.raises(ModelError, match=said):
        convert_model(model)


STRUCTURE = {"unknown input", "name twice", "cycle", "no such output"}
"""Found when names are resolved, not when the model is opened."""


def test_versions_that_are_not_known_name_both() -> None:
    with pytest.raises(OpsetError, match=rf"opset 99.*onnx {onnx.__version__} knows opsets up to"):
        convert_model(changed(LIES["newer opset"][0]))
    with pytest.raises(ModelError, match=rf"IR version .*onnx {onnx.__version__} knows versions up to"):
        convert_model(changed(LIES["newer IR"][0]))


@pytest.mark.parametrize("part", ["input", "output"])
def test_bodies_that_do_not_fit_their_node(part: str) -> None:
    model = model_of(LOOP)
    getattr(model.graph.node[0].attribute[0].g, part).pop()
    with pytest.raises(ModelError, match=r"A body of 'Y' \(Loop\) has .* must have 3 and 2"):
        convert_model(model)


@pytest.mark.parametrize("scans", [0, -(2**63), 2**62])
def test_scans_of_impossible_numbers(scans: int) -> None:
    model = model_of("""(float[2] S, float[3,2] X) => (float[2] F, float[3,2] Y) { F, Y = Scan <num_scan_inputs = 1,
        body = b (float[2] s, float[2] i) => (float[2] n, float[2] o) { n = Add (s, i) o = Neg (n) }> (S, X) }""")
    next(item for item in model.graph.node[0].attribute if item.name == "num_scan_inputs").i = scans
    with pytest.raises(ModelError, match="cannot scan"):
        convert_model(model)


def test_an_empty_model_is_one() -> None:
    empty = helper.make_model(helper.make_graph([], "g", [], []))
    assert convert_model(empty) == empty


def test_what_real_files_do_is_no_lie() -> None:
    """Nodes out of order, unknown ops, sizes of -1, documentation in another encoding."""
    model = model_of("(float[-1,4] X) => (float[2,4] Y) { h = c.Foo (X) Y = Relu (h) }", c=1)
    model.graph.node[0].doc_string = "\x7f\x7f"
    model = ModelProto.FromString(model.SerializeToString().replace(b"\x7f\x7f", b"\xff\xfe"))
    model.graph.node.reverse()
    check_wellformed(model)
    convert_model(model)


def test_shape_inference_sees_no_untyped_value() -> None:
    """onnx ends the process at an EyeLike behind an op that it does not know."""
    model = model_of("(float[3] X) => (float[3,3] Y) { I = c.Foo (X) e = EyeLike <dtype = 1> (I) Y = Neg (e) }", c=1)
    assert [node.op_type for node in convert_model(model, "O3").graph.node] == ["Foo", "EyeLike", "Cast", "Neg", "Cast"]


@pytest.mark.slow
def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Whatever sizes it claims: here, that of its input, of its weight, and of a value."""
    path = tmp_path / "m.onnx"
    text = f"(float[{2**40},4] X) => (float[{2**40},4] Y) {{ Y = Relu (X) }}"
    onnx.save(parse(text), path)
    code = f"import sys; from onnxamp._cli.command import group; group.main({['check', str(path)]!r})"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, preexec_fn=limited)
    assert done.returncode == 2, done.stderr
    assert "Give inputs" in done.stderr


# --- external data ----------------------------------------------------------------------------------------------


def external(folder: Path, location: str, inside: str) -> Path:
    """A model whose weight lies elsewhere: an initializer, a Constant, or one of a branch."""
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    if inside == "initializer":
        model = model_of("(float[4] X) => (float[4] Y) <float[4] w = {1, 2, 3, 4}> { Y = Mul (X, w) }")
        model.graph.initializer[0].CopyFrom(tensor)
    elif inside == "constant":
        model = model_of("(float[4] X) => (float[4] Y) { w = Constant <value_int = 1> () Y = Mul (X, w) }")
        model.graph.node[0].attribute[0].CopyFrom(AttributeProto(name="value", type=AttributeProto.TENSOR, t=tensor))
    else:
        model = model_of("""(bool C, float[4] X) => (float[4] Y) { Y = If (C) <
            then_branch = t () => (float[4] a) <float[4] w = {1, 2, 3, 4}> { a = Mul (X, w) },
            else_branch = e () => (float[4] b) { b = Neg (X) }> }""")
        model.graph.node[0].attribute[0].g.initializer[0].CopyFrom(tensor)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes with names")
@pytest.mark.parametrize("inside", ["initializer", "constant", "branch"])
@pytest.mark.parametrize("way", ["up", "absolute", "link", "folder link", "pipe", "device", "zero", "long", "circle"])
def test_no_data_file_but_those_in_the_folder_is_opened(way: str, inside: str, tmp_path: Path) -> None:
    """What is outside is a pipe: whoever opens it waits for ever."""
    folder, outside = tmp_path / "models", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    os.mkfifo(outside / "pipe")
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(outside / "pipe")
    (folder / "linked").symlink_to(outside, target_is_directory=True)
    (folder / "circle").symlink_to("circle")
    ways = {"up": "../outside/pipe", "absolute": str(outside / "pipe"), "link": "link", "folder link": "linked/pipe",
            "pipe": "pipe", "device": "/dev/zero", "zero": "a\0b", "long": "x" * 5000, "circle": "circle"}  # fmt: skip
    path = external(folder, ways[way], inside)
    with pytest.raises(ExternalDataError, match=r"'w'.*(outside the model's folder|not a regular file)"):
        convert_model(path)
    with pytest.raises(ExternalDataError, match=r"'w'"):
        InferenceSession(path)
    with pytest.raises(ExternalDataError, match=r"'w'"):
        InferenceSession(load_model(path))
    with pytest.raises(ExternalDataError, match=r"'w'"):
        make_session(path)
    with pytest.raises(ExternalDataError, match=r"'w'"):
        make_session(load_model(path))
    for command in ("check", "convert", "diff", "tune"):
        arguments = [path if argument == CLASSIFIER else argument for argument in COMMANDS[command][1:]]
        result = run(command, path, *[folder / a if str(a).endswith((".onnx", ".html")) else a for a in arguments])
        check_end(result)
        assert result.exit_code == (2 if command == "diff" else 1), result.output
        assert "'w'" in result.output


def test_shared_and_overlapping_ranges_are_fine(tmp_path: Path) -> None:
    model = model_of(
        "(float[4] X) => (float[4] Y) <float[4] w = {1, 2, 3, 4}, float[4] v = {1, 2, 3, 4}>"
        " { h = Mul (X, w) Y = Mul (h, v) }"
    )
    for offset, tensor in enumerate(model.graph.initializer):
        tensor.ClearField("float_data")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "data"), ("offset", str(4 * offset)), ("length", "16")):
            tensor.external_data.add(key=key, value=value)
    (tmp_path / "data").write_bytes(bytes(20))
    onnx.save(model, tmp_path / "m.onnx")
    assert len(convert_model(tmp_path / "m.onnx").graph.initializer) == 2


def test_places_said_twice(tmp_path: Path) -> None:
    path = external(tmp_path, "data", "initializer")
    (tmp_path / "data").write_bytes(bytes(16))
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data.add(key="location", value="../data")
    onnx.save(model, path)
    with pytest.raises(ExternalDataError, match="location of its data twice"):
        convert_model(path)
