"""Taking branches: the result computes what the original does, and shows what the branches hid."""

import zlib
from itertools import pairwise

import numpy as np
import onnx
import pytest
from graphs import CASES
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from real_models import needs, real_model

import onnxamp
from onnxamp._base.errors import ArgumentError, ModelError
from onnxamp._model.model import Model
from onnxamp._model.protos import node_bodies
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.engines import on_cpu
from onnxamp._runtime.piecewise.branches import resolve_branches
from onnxamp._runtime.sessions.session import make_session, run

SILERO = real_model("silero_vad")


def model_of(text, *, opset=17, ir=8):
    return parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}]> g {text}')


def with_outputs(model, names):
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    for name in names:
        copy.graph.output.add(name=name)
    return copy


def runner(feeds, log=None):
    """A ``run`` for resolve_branches, on ONNX Runtime."""

    def run_conditions(model, names):
        if log is not None:
            log.append(list(names))
        found = run(make_session(with_outputs(model, names), optimize=False), feeds)
        return {name: bool(value) for name, value in found.items()}

    return run_conditions


def taking(model, *, branch):
    """The model with the same branch of all Ifs whose condition is no constant."""
    return resolve_branches(model, lambda _, names: dict.fromkeys(names, branch))


def outputs_of(model, feeds):
    return run(make_session(model, optimize=False), feeds)


def reference_of(model, feeds):
    """For models that ONNX Runtime refuses: those that hide outer names, or return outer values."""
    names = [entry.name for entry in model.graph.output]
    return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))


def assert_identical(found, wanted):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        one, other = np.asarray(found[name]), np.asarray(value)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes(), name


def all_names(graph):
    """Names that every graph of the model defines, in one list."""
    found = [tensor.name for tensor in graph.initializer] + [sparse.values.name for sparse in graph.sparse_initializer]
    found += [entry.name for entry in graph.input if entry.name not in found]
    for node in graph.node:
        found += filter(None, node.output)
        for _, body in node_bodies(node):
            found += all_names(body)
    return found


def has_if(graph):
    return any(node.op_type == "If" for node in graph.node)


def check_taken(model, result, feeds, outputs=outputs_of):
    """What holds of every result."""
    checker.check_model(result)
    assert [entry.name for entry in result.graph.output] == [entry.name for entry in model.graph.output]
    assert list(result.graph.input) == list(model.graph.input)
    assert_identical(outputs(result, feeds), outputs(model, feeds))


X = np.random.default_rng(0).standard_normal((2, 2)).astype(np.float32)


def both_ways(text, *, outputs=outputs_of, opset=17):
    """Take both branches of a model whose only condition in the main graph is the input C; gives the results."""
    model = model_of(text, opset=opset)
    before = model.SerializeToString(deterministic=True)
    results = []
    for flag in (True, False):
        feeds = {"C": np.array(flag), "X": X}
        result = resolve_branches(model, lambda _, names, flag=flag: dict.fromkeys(names, flag))
        assert not has_if(result.graph)
        check_taken(model, result, feeds, outputs)
        results.append(result)
    assert model.SerializeToString(deterministic=True) == before
    return results


def ops(model):
    return [node.op_type for node in model.graph.node]


def made(model):
    return [name for node in model.graph.node for name in node.output]


IF_CASES = [name for name, case in CASES.items() if case.loads and has_if(case.build().graph)]


class TestEqual:
    @pytest.mark.mostly_slow(fast=40)
    @pytest.mark.parametrize("name", IF_CASES)
    @pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_corpus(self, name, level, dtype):
        case = CASES[name]
        model, feeds = case.build(), case.inputs()
        if level != "O0":
            model = emulate(onnxamp.convert_model(model, level=level, dtype=dtype, **case.options))
        result = resolve_branches(model, runner(feeds))
        assert not has_if(result.graph)
        check_taken(model, result, feeds)

    def test_there_are_cases(self):
        assert len(IF_CASES) >= 10

    @pytest.mark.mostly_slow(fast=2)
    @needs("silero_vad")
    @pytest.mark.parametrize("rate", [16000, 8000])
    @pytest.mark.parametrize("level", [None, "O2", "O3"])
    def test_silero(self, rate, level):
        model, feeds = onnx.load(SILERO), dict(np.load(SILERO.with_suffix(".npz")))
        feeds["sr"] = np.array(rate, feeds["sr"].dtype)
        if rate == 8000:
            feeds["input"] = feeds["input"][:, : 256 + 32]
        if level is not None:
            model = onnxamp.convert_model(model, level=level)
        log = []
        result = resolve_branches(model, runner(feeds, log))
        check_taken(model, result, feeds)
        assert not has_if(result.graph)
        assert len(log) == 3
        assert len(result.graph.node) > 150
        assert result.ByteSize() < 0.6 * model.ByteSize()


class TestNames:
    def test_values_keep_their_names_and_results_take_the_outputs(self):
        then, other = both_ways("""(bool C, float[2,2] X) => (float[2,2] Y) {
            Y = If (C) <
                then_branch = t () => (float[2,2] a) { m = Exp (X) a = Neg (m) },
                else_branch = e () => (float[2,2] b) { n = Abs (X) b = Sqrt (n) }
            >
        }""")
        assert made(then) == ["m", "Y"]
        assert made(other) == ["n", "Y"]

    def test_a_branch_result_may_have_the_outputs_name(self):
        for result in both_ways("""(bool C, float[2,2] X) => (float[2,2] Y) {
            Y = If (C) <
                then_branch = t () => (float[2,2] v) { Z = Exp (X) v = Neg (Z) },
                else_branch = e () => (float[2,2] v) { Z = Abs (X) v = Sqrt (Z) }
            >
        }"""):
            assert made(result) == ["Z", "Y"]

    def test_siblings_with_the_same_names(self):
        for result in both_ways("""(bool C, float[2,2] X) => (float[2,2] Y) {
            p = If (C) <
                then_branch = t () => (float[2,2] v) <float[1] k = {2}> { u = Mul (X, k) v = Relu (u) },
                else_branch = e () => (float[2,2] v) <float[1] k = {3}> { u = Mul (X, k) v = Exp (u) }
            >
            Y = If (C) <
                then_branch = t () => (float[2,2] v) <float[1] k = {5}> { u = Add (p, k) v = Relu (u) },
                else_branch = e () => (float[2,2] v) <float[1] k = {7}> { u = Sub (p, k) v = Exp (u) }
            >
        }"""):
            assert made(result) == ["u", "p", "u_1", "Y"]
            assert [tensor.name for tensor in result.graph.initializer] == ["k", "k_1"]

    def test_names_of_bodies_that_stay_are_avoided(self):
        """The Loop's body hides nothing of what the branch now puts around it."""
        for (
            result
        ) in both_ways("""(bool C, float[2,2] X) => (float[2,2] Y, float[2,2] Z) <int64 m = {2}, bool go = {1}> {
            Y = If (C) <
                then_branch = t () => (float[2,2] a) { v = Exp (X) a = Neg (v) },
                else_branch = e () => (float[2,2] b) { v = Abs (X) b = Sqrt (v) }
            >
            Z = Loop (m, go, X) <body = l (int64 i, bool c, float[2,2] s) => (bool d, float[2,2] n) {
                d = Identity (c) v = Sin (s) n = Add (v, s)
            }>
        }"""):
            assert made(result) == ["v_1", "Y", "Z"]
            assert len(set(all_names(result.graph))) == len(all_names(result.graph))

    def test_a_moved_value_is_renamed_where_bodies_read_it(self):
        """Captures one and two levels down, and a body that returns what it captured."""
        for (
            result
        ) in both_ways("""(bool C, float[2,2] X) => (float[2,2] Y, float[2,2] W) <int64 m = {2}, bool go = {1}> {
            Y = If (C) <
                then_branch = t () => (float[2,2] r) <float[1] k = {2}> {
                    u = Mul (X, k)
                    r = Loop (m, go, u) <body = l (int64 i, bool c, float[2,2] s) => (bool d, float[2,2] n) {
                        d = Identity (c)
                        p = Add (s, u)
                        n = Scan <num_scan_inputs = 1, body = b (float[2] q) => (float[2] o) { o = Mul (q, k) }> (p)
                    }>
                },
                else_branch = e () => (float[2,2] r) <float[1] k = {3}> {
                    u = Mul (X, k)
                    r = Loop (m, go, u) <body = l (int64 i, bool c, float[2,2] s) => (bool d, float[2,2] n) {
                        d = Identity (c)
                        n = If (c) <
                            then_branch = t () => (float[2,2] o) { f = Mul (u, k) o = Add (f, s) },
                            else_branch = e () => (float[2,2] o) { o = Identity (u) }
                        >
                    }>
                }
            >
            W = If (C) <
                then_branch = t () => (float[2,2] r) <float[1] k = {4}> { u = Mul (X, k) r = Neg (u) },
                else_branch = e () => (float[2,2] r) <float[1] k = {5}> { u = Mul (X, k) r = Neg (u) }
            >
        }"""):
            assert {"u", "u_1"} <= set(made(result))

    def test_what_hides_outer_names(self):
        """Inner definitions win, in the original as in the result."""
        for result in both_ways(
            """(bool C, float[2,2] X) => (float[2,2] Y, float[2,2] Z) <int64 m = {2}, bool go = {1}> {
                v = Neg (X)
                Y = If (C) <
                    then_branch = t () => (float[2,2] Y) { v = Abs (X) Z = Exp (v) Y = Add (v, Z) },
                    else_branch = e () => (float[2,2] Y) { v = Exp (X) Z = Neg (v) Y = Mul (v, Z) }
                >
                Z = Sub (v, Y)
            }""",
            outputs=reference_of,
        ):
            assert made(result) == ["v", "v_1", "Z_1", "Y", "Z"]

    def test_a_result_does_not_take_a_name_that_a_body_hides(self):
        """The Loop of the branch has its own Y: were ``a`` called Y, it would read that one."""
        for result in both_ways(
            """(bool C, float[2,2] X) => (float[2,2] Y, float[2,2] Z) <int64 m = {2}, bool go = {1}> {
                Y, Z = If (C) <
                    then_branch = t () => (float[2,2] a, float[2,2] z) {
                        a = Abs (X)
                        z = Loop (m, go, X) <body = l (int64 i, bool c, float[2,2] s) => (bool d, float[2,2] n) {
                            d = Identity (c) Y = Sin (s) n = Add (Y, a)
                        }>
                    },
                    else_branch = e () => (float[2,2] b, float[2,2] z) {
                        b = Neg (X)
                        z = Loop (m, go, b) <body = l (int64 i, bool c, float[2,2] s) => (bool d, float[2,2] n) {
                            d = Identity (c) Y = Cos (s) n = Mul (Y, b)
                        }>
                    }
                >
            }""",
            outputs=reference_of,
        ):
            assert ops(result)[1:] == ["Loop", "Identity"]

    def test_node_names_stay_unique(self):
        model = model_of("""(bool C, float[2,2] X) => (float[2,2] Y) {
            p = Neg (X)
            q = If (C) <
                then_branch = t () => (float[2,2] a) { a = Exp (p) },
                else_branch = e () => (float[2,2] b) { b = Abs (p) }
            >
            Y = Relu (q)
        }""")
        for node in (*model.graph.node, model.graph.node[1].attribute[0].g.node[0]):
            node.name = "same" if node.op_type != "Relu" else "relu"
        names = [node.name for node in taking(model, branch=True).graph.node]
        assert names == ["same", "same_1", "relu"]


class TestResults:
    def test_one_result_for_two_outputs(self):
        """ONNX Runtime leaves one of the two outputs of such an If unwritten."""
        for result in both_ways(
            """(bool C, float[2,2] X) => (float[2,2] Y, float[2,2] Z) {
                Y, Z = If (C) <
                    then_branch = t () => (float[2,2] a, float[2,2] a) { a = Exp (X) },
                    else_branch = e () => (float[2,2] b, float[2,2] b) { b = Neg (X) }
                >
            }""",
            outputs=reference_of,
        ):
            assert ops(result)[1:] == ["Identity"]

    def test_an_initializer_as_result(self):
        then, other = both_ways("""(bool C, float[2,2] X) => (float[2,2] Y) {
            Y = If (C) <
                then_branch = t () => (float[2,2] k) <float[2,2] k = {1, 2, 3, 4}> { u = Neg (k) },
                else_branch = e () => (float[2,2] k) <float[2,2] k = {5, 6, 7, 8}> { u = Exp (X) }
            >
        }""")
        assert ops(then) == ["Neg", "Identity"]
        assert ops(other) == ["Exp", "Identity"]

    def test_an_outer_value_as_result(self):
        then, other = both_ways(
            """(bool C, float[2,2] X) => (float[2,2] Y, float[2,2] Z) <float[2,2] w = {1, 2, 3, 4}> {
                r = Neg (X)
                Y, Z = If (C) <
                    then_branch = t () => (float[2,2] r, float[2,2] w) { },
                    else_branch = e () => (float[2,2] X, float[2,2] a) { a = Exp (r) }
                >
            }""",
            outputs=reference_of,
        )
        assert made(then) == ["r", "Y", "Z"]
        assert ops(other) == ["Neg", "Exp", "Identity"]

    def test_a_moved_value_as_result_of_a_nested_if(self):
        both_ways(
            """(bool C, float[2,2] X) => (float[2,2] Y) {
                Y = If (C) <
                    then_branch = t () => (float[2,2] a) {
                        r = Neg (X)
                        a = If (C) <
                            then_branch = t () => (float[2,2] r) { },
                            else_branch = e () => (float[2,2] X) { }
                        >
                    },
                    else_branch = e () => (float[2,2] b) {
                        r = Exp (X)
                        s = Neg (r)
                        b = If (C) <
                            then_branch = t () => (float[2,2] s) { },
                            else_branch = e () => (float[2,2] r) { }
                        >
                    }
                >
            }""",
            outputs=reference_of,
        )

    def test_nested_with_captures_from_two_levels_up(self):
        """The condition of the inner Ifs is made by the outer branches; both levels use one name for their own."""
        model = model_of("""(bool C, float[2,2] X) => (float[2,2] Y) {
            r = Neg (X)
            Y = If (C) <
                then_branch = t () => (float[2,2] a) {
                    u = Exp (r)
                    c = Not (C)
                    a = If (c) <
                        then_branch = t () => (float[2,2] k) { k = Add (u, r) },
                        else_branch = e () => (float[2,2] k) { w = Mul (u, r) k = Sub (w, X) }
                    >
                },
                else_branch = e () => (float[2,2] a) {
                    u = Abs (r)
                    c = Not (C)
                    s = If (c) <
                        then_branch = t () => (float[2,2] k) { w = Add (u, r) k = Mul (w, u) },
                        else_branch = e () => (float[2,2] k) { k = Sub (u, X) }
                    >
                    a = Relu (s)
                }
            >
        }""")
        for flag, expected in ((True, ["r", "u", "c", "w", "Y"]), (False, ["r", "u", "c", "w", "s", "Y"])):
            feeds, log = {"C": np.array(flag), "X": X}, []
            result = resolve_branches(model, runner(feeds, log))
            assert log == [["C"], ["c"]]
            assert made(result) == expected
            check_taken(model, result, feeds)
            for name in expected:
                outputs_of(with_outputs(result, [name]), feeds)

    def test_sequences(self):
        both_ways("""(bool C, float[2,2] X) => (float[2,2] Y) <int64 one = {1}> {
            s = If (C) <
                then_branch = t () => (seq(float[2,2]) a) { n = Neg (X) a = SequenceConstruct (X, n) },
                else_branch = e () => (seq(float[2,2]) b) { n = Exp (X) b = SequenceConstruct (n, n) }
            >
            Y = SequenceAt (s, one)
        }""")

    @pytest.mark.parametrize("ir", [3, 8])
    def test_initializers_move(self, ir):
        model = model_of(
            """(bool C, float[2,2] X) => (float[2,2] Y) {
                Y = If (C) <
                    then_branch = t () => (float[2,2] a) { a = Mul (X, k) },
                    else_branch = e () => (float[2,2] b) { b = Neg (X) }
                >
            }""",
            opset=8,
            ir=ir,
        )
        then = model.graph.node[0].attribute[0].g
        then.initializer.append(numpy_helper.from_array(np.float32([2, 3]), "k"))
        feeds = {"C": np.array(True), "X": X}
        found = outputs_of(taking(model, branch=True), feeds)
        assert_identical(found, {"Y": X * np.float32([2, 3])})
        assert not taking(model, branch=False).graph.initializer

    def test_sparse_initializers_move(self):
        model = model_of("""(bool C, float[2,2] X) => (float[2,2] Y) {
            k = Neg (X)
            Y = If (C) <
                then_branch = t () => (float[2,2] a) { a = MatMul (X, q) },
                else_branch = e () => (float[2,2] b) { b = Neg (X) }
            >
        }""")
        then = model.graph.node[1].attribute[0].g
        values, indices = helper.make_tensor("q", 1, [1], [2.0]), helper.make_tensor("i", 7, [1], [1])
        then.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
        for label in ("k", "X", "Y"):
            then.sparse_initializer[0].values.name = then.node[0].input[1] = label
            result = taking(model, branch=True)
            assert result.graph.sparse_initializer[0].values.name == f"{label}_1"
            assert result.graph.node[1].input[1] == f"{label}_1"
            assert then.sparse_initializer[0].values.name == label

    def test_declared_types_move(self):
        model = model_of("""(bool C, float[2,2] X) => (float[N,M] Y) <float[2,2] u> {
            u = Neg (X)
            q = If (C) <
                then_branch = t () => (float[2,2] a) <float[2,2] u, float[1,2] w, float[2,2] a> {
                    u = Exp (X) w = ReduceMax (u) a = Add (u, w)
                },
                else_branch = e () => (float[2,2] b) { b = Abs (X) }
            >
            Y = Add (q, u)
        }""")
        result = taking(model, branch=True)
        types = {entry.name: entry.type.tensor_type for entry in result.graph.value_info}
        assert {name: [dim.dim_value for dim in kind.shape.dim] for name, kind in types.items()} == {
            "u": [2, 2], "u_1": [2, 2], "w": [1, 2], "q": [2, 2],
        }  # fmt: skip
        assert len(types) == len(result.graph.value_info)


class TestConditions:
    TWO = """(bool C, float[2,2] X) => (float[2,2] Y) <bool yes = {1}> {
        no = Constant <value = bool {0}> ()
        d = Not (C)
        p = If (yes) < then_branch = t () => (float[2,2] a) { a = Exp (X) },
                       else_branch = e () => (float[2,2] b) { b = Neg (X) } >
        q = If (no) <  then_branch = t () => (float[2,2] a) { a = Exp (p) },
                       else_branch = e () => (float[2,2] b) { b = Neg (p) } >
        r = If (d) <   then_branch = t () => (float[2,2] a) { a = Sin (q) },
                       else_branch = e () => (float[2,2] b) { b = Cos (q) } >
        s = If (d) <   then_branch = t () => (float[2,2] a) { a = Sin (r) },
                       else_branch = e () => (float[2,2] b) { b = Cos (r) } >
        Y = If (C) <   then_branch = t () => (float[2,2] a) { a = Tanh (s) },
                       else_branch = e () => (float[2,2] b) { b = Relu (s) } >
    }"""

    def test_what_needs_a_run(self):
        model = model_of(self.TWO)
        log = []
        result = resolve_branches(model, runner({"C": np.array(True), "X": X}, log))
        assert log == [["d", "C"]]
        assert ops(result) == ["Constant", "Not", "Exp", "Neg", "Cos", "Cos", "Tanh"]
        assert resolve_branches(result, None).SerializeToString() == result.SerializeToString()

    def test_a_default_that_callers_may_override_needs_a_run(self):
        model = model_of(self.TWO)
        model.graph.input.add().CopyFrom(helper.make_tensor_value_info("yes", TensorProto.BOOL, []))
        log = []
        resolve_branches(model, runner({"C": np.array(True), "X": X}, log))
        assert log == [["yes", "d", "C"]]

    def test_constants_alone_need_none(self):
        model = model_of(self.TWO)
        del model.graph.node[4:]
        model.graph.output[0].name = "q"
        assert ops(resolve_branches(model, None)) == ["Constant", "Not", "Exp", "Neg"]

    def test_conditions_of_bodies_are_not_asked_for(self):
        model = CASES["if_inside_loop"].build()
        assert resolve_branches(model, None).SerializeToString() == model.SerializeToString()

    def test_what_cannot_be_taken(self):
        model = model_of(self.TWO)
        with pytest.raises(ArgumentError, match="did not return the condition 'd'"):
            resolve_branches(model, lambda _model, _names: {"C": True})
        del model.graph.node[3].attribute[1]
        with pytest.raises(ModelError, match="'q' has no else_branch"):
            taking(model, branch=True)

    def test_omitted_outputs(self):
        model = model_of("""(bool C, float[2,2] X) => (float[2,2] Y) {
            p, Y = If (C) <
                then_branch = t () => (float[2,2] a, float[2,2] b) { a = Exp (X) b = Neg (a) },
                else_branch = e () => (float[2,2] a, float[2,2] b) { a = Sin (X) b = Neg (a) }
            >
        }""")
        model.graph.node[0].output[0] = ""
        feeds = {"C": np.array(True), "X": X}
        result = taking(model, branch=True)
        assert made(result) == ["a", "Y"]
        assert_identical(outputs_of(result, feeds), {"Y": -outputs_of(with_outputs(result, ["a"]), feeds)["a"]})


class TestSize:
    @pytest.mark.slow
    def test_many_ifs(self):
        model = model_of("(bool C, float[2,2] X) => (float[2,2] Y) { n0 = Neg (X) Y = Neg (n0) }")
        node = model_of("""(bool C, float[2,2] X) => (float[2,2] Y) {
            Y = If (C) < then_branch = t () => (float[2,2] a) { m = Exp (X) a = Neg (m) },
                         else_branch = e () => (float[2,2] a) { a = Abs (X) } >
        }""").graph.node[0]
        for index in range(2000):
            model.graph.node.append(node)
            model.graph.node[-1].output[0] = f"n{index + 1}"
        result = taking(model, branch=True)
        assert len(result.graph.node) == 4002
        assert len(set(made(result))) == 4002

    def test_deep_nesting(self):
        text = "y0 = Neg (X)"
        for depth in range(10):  # ONNX Runtime 1.23 takes twice as long for each level
            text = (
                f"y{depth + 1} = If (C) < then_branch = t () => (float[2,2] y{depth}) {{ {text} }},"
                f" else_branch = e () => (float[2,2] z{depth}) {{ z{depth} = Abs (X) }} >"
            )
        model = model_of(f"(bool C, float[2,2] X) => (float[2,2] y10) {{ {text} }}")
        feeds, log = {"C": np.array(True), "X": X}, []
        result = resolve_branches(model, runner(feeds, log))
        assert len(log) == 10
        assert made(result) == ["y10"]
        check_taken(model, result, feeds)


def test_external_data_stay_references():
    model = model_of("""(bool C, float[2,2] X) => (float[2,2] Y) {
        Y = If (C) <
            then_branch = t () => (float[2,2] a) { a = Mul (X, k) },
            else_branch = e () => (float[2,2] b) { b = Neg (X) }
        >
    }""")
    tensor = TensorProto(name="k", dims=[2], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=f"{zlib.crc32(b'k')}.bin")
    model.graph.node[0].attribute[0].g.initializer.append(tensor)
    assert list(taking(model, branch=True).graph.initializer) == [tensor]


def test_a_condition_that_is_fed_chooses_the_branch_of_each_sample() -> None:
    """What one sample took to prepare serves those that feed the same condition, and no other."""
    model = model_of("""(bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = g1 () => (float[2] a) { a = Neg (x) },
            else_branch = g2 () => (float[2] b) { b = Exp (x) }
        >
    }""")
    session = on_cpu(Model.of(model))
    x, runners = np.float32([1, 2]), []
    for condition in (True, True, False, True):
        feeds = {"c": np.array(condition), "x": x}
        runners.append(session.prepare(feeds))
        np.testing.assert_allclose(session.run(feeds)["y"], -x if condition else np.exp(x), rtol=1e-6)
    assert runners[0] is runners[1]
    assert runners[1] is not runners[2]


def test_conditions_that_are_computed_are_computed_for_each_sample() -> None:
    """Where all of them hold as before, the same preparation serves, also for those in and after other branches."""
    model = model_of("""(float[2] x) => (float[2] y) {
        nil = Constant <value = float {0}> ()
        s = ReduceSum <keepdims = 0> (x)
        c = Greater (s, nil)
        h = If (c) <
            then_branch = g1 () => (float[2] a) { a = Neg (x) },
            else_branch = g2 () => (float[2] b) {
                one = Constant <value = float {-9}> ()
                d = Less (s, one)
                b = If (d) <
                    then_branch = g3 () => (float[2] p) { p = Exp (x) },
                    else_branch = g4 () => (float[2] q) { q = Abs (x) }
                >
            }
        >
        m = ReduceMax <keepdims = 0> (h)
        f = Greater (m, nil)
        y = If (f) <
            then_branch = g5 () => (float[2] r) { r = Add (h, h) },
            else_branch = g6 () => (float[2] t) { t = Mul (h, h) }
        >
    }""")
    session = on_cpu(Model.of(model))
    cases = {
        (1, 2): lambda x: x * x,
        (3, 4): lambda x: x * x,
        (-1, 2): lambda x: -2 * x,
        (-1, -2): lambda x: 2 * np.abs(x),
        (-2, -2): lambda x: 2 * np.abs(x),
        (-9, -2): lambda x: 2 * np.exp(x),
        (5, 5): lambda x: x * x,
    }
    runners = []
    for numbers, expected in cases.items():
        x = np.float32(numbers)
        runners.append(session.prepare({"x": x}))
        np.testing.assert_allclose(session.run({"x": x})["y"], expected(x), rtol=1e-6)
    is_kept = [one is other for one, other in pairwise(runners)]
    assert is_kept == [True, False, False, True, False, False]
