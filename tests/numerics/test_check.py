"""What ``check_run`` finds in models that go wrong, by name; and that it accuses nothing else."""

from itertools import product

import ml_dtypes
import numpy as np
import onnx
import pytest
from commands import MODELS
from conversions import LEVELS, converted
from every import every
from graphs import CASES
from graphs.case import add_weights, parse
from repository import feeds as model_feeds

from onnxamp import convert_model
from onnxamp._audit.audit import audit_model
from onnxamp._base.errors import ArgumentError, OpsetError
from onnxamp._numerics.check import OpFilter, check_run
from onnxamp._numerics.diff_models import diff_models
from onnxamp._runtime.inputs.samples import Samples

LOW = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ELEM = {"float16": 10, "bfloat16": 16}
INF, NAN = np.inf, np.nan


def given(*feeds):
    return Samples("given", [lambda feed=feed: feed for feed in feeds])


def low_model(text, weights, dtype, opset=17):
    """A model as a careless conversion leaves it: every float is low."""
    with np.errstate(over="ignore", under="ignore"):
        held = {
            name: np.asarray(w).astype(LOW[dtype]) if np.asarray(w).dtype.kind == "f" else np.asarray(w)
            for name, w in weights.items()
        }
    text = text.replace("float[", f"{dtype}[").replace("ELEM", str(ELEM[dtype]))
    return add_weights(parse(text, opset, 10), held)


def rows_of(*values):
    return np.float32(values).reshape(1, -1)


def faults(run):
    return {row.value: row.fault for row in run.values if row.fault}


# --- what goes wrong ------------------------------------------------------------------------------------------

IO = "(float[R,N] X) => (float[R,M] Y)"
NORM = f"""{IO} {{
    [square] q = Mul (X, X) [mean] m = ReduceMean <axes = [-1]> (q) [plus] a = Add (m, e) [root] r = Sqrt (a)
    [divide] Y = Div (X, r)
}}"""
SOFTMAX = f"{IO} {{ [exp] x = Exp (X) [sum] s = ReduceSum (x, axes) [divide] Y = Div (x, s) }}"
MASK = f"""{IO} {{
    [nothing] z = Sub (X, X) [first] k = Add (z, m) [mask] t = Add (k, n) [add] s = Add (X, t) [softmax] Y = Softmax (s)
}}"""
CONSTANT_MASK = f"{IO} {{ [mask] t = Add (m, n) [add] s = Add (X, t) [softmax] Y = Softmax (s) }}"
AXES = {"axes": np.array([-1])}
E = {"e": [1e-6]}

BAD = {
    # name: (graph, weights, input, value and node and fault that are told, types)
    "rms_norm_ends_in_zeros": (NORM, E, rows_of(500, -400, 300), ("q", "square", "Inf"), ["float16"]),
    "mask_becomes_infinite": (
        MASK, {"m": [[-6e4, -6e4]], "n": [[-6e4, -6e4]]}, rows_of(1, 2), ("t", "mask", "Inf"), ["float16"],
    ),
    "mask_is_infinite_in_float32": (
        MASK, {"m": [[-3e38, -3e38]], "n": [[-3e38, -3e38]]}, rows_of(1, 2), ("t", "mask", "Inf"), ["bfloat16"],
    ),
    "constant_mask_becomes_infinite": (
        CONSTANT_MASK, {"m": [[-6e4, -6e4]], "n": [[-6e4, -6e4]]}, rows_of(1, 2), ("t", "mask", "Inf"), ["float16"],
    ),
    "epsilon_is_zero": (
        f"{IO} {{ [norm] n = ReduceL2 <axes = [-1]> (X) [max] m = Max (n, e) [divide] Y = Div (X, m) }}",
        {"e": [1e-12]}, rows_of(0, 0), ("Y", "divide", "NaN"), ["float16"],
    ),
    "epsilon_flushes_as_it_is_computed": (
        f"{IO} {{ [eps] z = Mul (e, k) [max] m = Max (X, z) [divide] Y = Div (X, m) }}",
        {"e": [1e-5, 1e-5], "k": [1e-5, 1e-5]}, rows_of(0, 0), ("z", "eps", "all zero"), ["float16"],
    ),
    "exp": (SOFTMAX, AXES, rows_of(12, 1, 2), ("x", "exp", "Inf"), ["float16"]),
    "exp_in_float32_too": (SOFTMAX, AXES, rows_of(100, 1, 2), ("x", "exp", "Inf"), ["float16", "bfloat16"]),
    "sum": (
        f"{IO} {{ [sum] s = ReduceSum (X, axes) [divide] Y = Div (X, s) }}",
        AXES, np.full((1, 2000), 100, np.float32), ("s", "sum", "Inf"), ["float16"],
    ),
    "pow": (
        f"{IO} {{ [pow] p = Pow (X, two) [back] Y = Sqrt (p) }}",
        {"two": [2.0]}, rows_of(300, 2), ("p", "pow", "Inf"), ["float16"],
    ),
    "weight_is_infinite": (
        f"{IO} {{ [before] a = Relu (X) [product] b = MatMul (a, w) [after] Y = Tanh (b) }}",
        {"w": [[7e38, 1.0], [1.0, 1.0]]}, rows_of(1, 2), ("b", "product", "Inf"), ["float16", "bfloat16"],
    ),
    "weight_is_infinite_and_ends_in_nan": (
        f"{IO} {{ [before] a = Relu (X) [product] b = MatMul (a, w) [after] Y = Softmax (b) }}",
        {"w": [[7e38, 7e38], [1.0, 1.0]]}, rows_of(1, 2), ("b", "product", "Inf"), ["float16", "bfloat16"],
    ),
    "square_root_of_a_negative_number": (
        f"{IO} {{ [neg] n = Neg (X) [root] r = Sqrt (n) [exp] Y = Exp (r) }}",
        {}, rows_of(1, 2), ("r", "root", "NaN"), ["float16", "bfloat16"],
    ),
    "scale_flushes": (
        f"{IO} {{ [scale] a = Mul (X, s) [back] Y = Div (a, s) }}",
        {"s": [1e-6]}, rows_of(1e-3, 2e-3), ("a", "scale", "all zero"), ["float16"],
    ),
    "a_part_vanishes": (
        f"{IO} {{ [scale] a = Mul (X, s) [back] Y = Div (a, s) }}",
        {"s": [1e-4]}, rows_of(1e-3, 2e-4), ("a", "scale", "vanished"), ["float16"],
    ),
}  # fmt: skip
CASES_BAD = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, case in BAD.items() for dtype in case[4]]


@pytest.mark.parametrize(("name", "dtype"), CASES_BAD)
def test_known_bad(name, dtype):
    text, weights, x, (value, node, fault), _ = BAD[name]
    run = check_run(low_model(text, weights, dtype), given({"X": x}))
    assert run.skipped is None
    assert (run.first_bad.value, run.first_bad.node) == (value, node), run
    assert faults(run) == {value: fault}, "nothing but the cause is accused"
    assert run.first_bad.alarm
    assert run.ran_on == f"CPU, emulated {dtype}"


@pytest.mark.mostly_slow(fast=4)
@pytest.mark.parametrize(("name", "dtype"), CASES_BAD)
def test_known_bad_in_a_branch(name, dtype):
    text, weights, x, (_, node, fault), _ = BAD[name]
    body = text[text.index("{") + 1 : text.rindex("}")].replace("Y =", "inner =")
    text = f"""(float[R,N] X, bool c) => (float[R,M] Y) {{
        flag = Identity (c)
        [if] Y = If (flag) <
            then_branch = t () => (float[a,b] inner) {{ {body} }},
            else_branch = o () => (float[a,b] other) {{ other = Relu (X) }}
        >
    }}"""
    model = low_model(text, weights, dtype)
    good, bad = ({"X": x, "c": np.array(flag)} for flag in (False, True))
    assert check_run(model, given(good)).first_bad is None
    for samples in (given(bad), given(good, bad), given(bad, good)):
        run = check_run(model, samples)
        assert run.first_bad is not None
        assert run.first_bad.node == node
        assert list(faults(run).values()) == [fault]


@pytest.mark.parametrize("dtype", LOW)
def test_it_goes_on_where_float32_goes_on(dtype):
    """The same graphs and inputs in float32 (or bfloat16, whose range is wider) have no fault."""
    for name in ("rms_norm_ends_in_zeros", "exp", "sum", "pow", "scale_flushes", "a_part_vanishes", "epsilon_is_zero"):
        text, weights, x, _, _ = BAD[name]
        held = {key: np.asarray(w, np.float32) if np.asarray(w).dtype.kind == "f" else w for key, w in weights.items()}
        assert check_run(add_weights(parse(text), held), given({"X": x})).first_bad is None, name
        if dtype == "bfloat16":
            assert check_run(low_model(text, weights, dtype), given({"X": x})).first_bad is None, name


def test_float32_models_are_checked_too():
    text, _, x, _, _ = BAD["square_root_of_a_negative_number"]
    run = check_run(parse(text), given({"X": x}))
    assert (run.first_bad.node, run.ran_on) == ("root", "CPU")
    assert run.first_bad.alarm == "NaN in 2 of 2 elements"
    text, weights, x, _, _ = BAD["exp_in_float32_too"]
    run = check_run(add_weights(parse(text), weights), given({"X": x}))
    assert run.first_bad.node == "exp"
    assert "in float32 already" in run.first_bad.alarm


def test_what_is_told():
    text, weights, x, _, _ = BAD["rms_norm_ends_in_zeros"]
    run = check_run(low_model(text, weights, "float16"), given({"X": x}))
    assert run.first_bad.alarm == "Inf in 3 of 3 elements; the exact result reaches 2.5e+05"
    rows = {row.value: row for row in run.values}
    assert [row.value for row in run.values] == ["q", "m", "a", "r", "Y"]
    assert [row.position for row in run.values] == sorted(row.position for row in run.values)
    assert rows["q"].readers == ("mean",)
    assert (rows["q"].op, rows["q"].dtype) == ("Mul", "float16")
    assert [rows[name].inherited for name in ("q", "m", "a", "r", "Y")] == [False, True, True, True, True]
    assert rows["Y"].measured.found_zero == 3
    assert rows["q"].measured.reference_max == 250000


def test_a_sentinel_that_saturates_is_not_called_infinite_in_float32():
    """-3.4e38 is finite in float32; in bfloat16 it is -inf, which makes NaN of a masked row."""
    model = parse(
        f"{IO} {{ [low] b = Cast <to = 16> (X) [softmax] s = Softmax (b) [up] Y = Cast <to = 1> (s) }}", 21, 10
    )
    run = check_run(model, given({"X": np.full((1, 2), -3.4028235e38, np.float32)}))
    assert (run.first_bad.node, faults(run)) == ("low", {"b": "Inf"})
    assert "in float32 already" not in run.first_bad.alarm
    assert run.first_bad.alarm.startswith("Inf in 2 of 2 elements")


# --- indices: no value is broken, but they are wrong ----------------------------------------------------------


def test_an_index_that_float16_cannot_count():
    text = """(int64[N] I) => (float[N] Y) {
        [in] f = Cast <to = ELEM> (I) [next] g = Add (f, one) [out] i = Cast <to = 7> (g) [gather] Y = Gather (t, i)
    }"""
    table = np.arange(5000, dtype=np.float32) % 7
    one = add_weights(parse(text.replace("ELEM", "1")), {"one": np.float32([1]), "t": table})
    other = add_weights(parse(text.replace("ELEM", "10")), {"one": np.float16([1]), "t": table})
    samples = given({"I": np.arange(2040, 2060)})
    assert check_run(other, samples).first_bad is None, "nothing is broken"
    found = diff_models(one, other, samples, layers=True)
    assert not found.passed
    local = {row.value: row.local.error_max for row in found.layers if row.local is not None}
    assert local["f"] == 1, "counted from 2049 on in steps of two"
    assert local["g"] >= 1
    assert any(finding.node == "next" and "2048" in finding.text for finding in audit_model(other).findings)


# --- what must not be accused ---------------------------------------------------------------------------------

FINE = {
    "mask_of_minus_infinity": (
        f"{IO} {{ s = Add (X, m) Y = Softmax (s) }}", {"m": [[0, -INF, 0]]}, rows_of(1, 2, 3),
    ),
    "mask_by_where": (
        f"{IO} {{ s = Where (b, X, m) t = Mul (s, two) Y = Softmax (t) }}",
        {"b": np.array([[True, False, True]]), "m": [-INF], "two": [2.0]}, rows_of(1, 2, 3),
    ),
    "sentinel_in_range": (f"{IO} {{ s = Add (X, m) Y = Softmax (s) }}", {"m": [[0, -6e4, 0]]}, rows_of(1, 2, 3)),
    "sentinel_at_the_largest_number": (
        f"{IO} {{ s = Where (b, X, m) Y = Softmax (s) }}",
        {"b": np.array([[True, False, True]]), "m": [-65504.0]}, rows_of(1, 2, 3),
    ),
    "one_minus_mask": (f"{IO} {{ k = Sub (one, X) Y = Mul (k, m) }}", {"one": [1.0], "m": [-1e4]}, rows_of(1, 1, 1)),
    "relu_of_negative_numbers": (f"{IO} {{ r = Relu (X) Y = Add (r, X) }}", {}, rows_of(-1, -2)),
    "zeros": (f"{IO} {{ r = Mul (X, X) s = Sqrt (r) Y = Exp (s) }}", {}, rows_of(0, 0)),
    "log_of_zero_in_a_masked_branch": (
        f"{IO} {{ l = Log (X) p = Greater (X, zero) Y = Where (p, l, zero) }}", {"zero": [0.0]}, rows_of(0, 2, 3),
    ),
    "small_numbers_flush": (f"{IO} {{ a = Mul (X, s) Y = Add (a, X) }}", {"s": [1e-3]}, rows_of(1e-5, 1, 2)),
    "softmax_underflows": (f"{IO} {{ Y = Softmax (X) }}", {}, rows_of(0, 60, 61)),
    "clipped_to_the_largest_number": (
        f"{IO} {{ c = Clip (X, lo, hi) Y = Mul (c, X) }}", {"lo": -65504.0, "hi": 65504.0}, rows_of(1, -1),
    ),
    "empty": (f"{IO} {{ r = Exp (X) Y = Mul (r, r) }}", {}, np.zeros((0, 3), np.float32)),
    "nan_and_infinity_in_the_input": (f"{IO} {{ r = Exp (X) Y = Mul (r, X) }}", {}, rows_of(NAN, 1, -INF)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", *LOW])
@pytest.mark.parametrize("name", FINE)
def test_what_is_fine(name, dtype):
    text, weights, x = FINE[name]
    if dtype == "float32":
        kinds = {key: np.asarray(w) for key, w in weights.items()}
        held = {key: w.astype(np.float32) if w.dtype.kind == "f" else w for key, w in kinds.items()}
        model = add_weights(parse(text), held)
    else:
        model = low_model(text, weights, dtype)
    run = check_run(model, given({"X": x}))
    assert run.skipped is None
    assert faults(run) == {}


@pytest.mark.parametrize("fed", [False, True], ids=["held", "fed"])
@pytest.mark.parametrize("number", [-INF, -65504.0, -30000.0])
def test_masks_that_are_large_weights(number, fed):
    """Also where they are fed to the pieces, as the weights of large models are."""
    mask = np.triu(np.full((256, 256), number, np.float32), 1)
    eye = np.eye(256, dtype=np.float32)
    body = "h = MatMul (X, w) a = Add (h, m) b = Where (p, a, m) Y = Softmax (b)"
    text = f"(float[256,256] X) => (float[256,256] Y) {{ {body} }}"
    model = low_model(text, {"w": eye, "m": mask, "p": mask == 0}, "float16")
    if fed:  # so many weights do not stay in the graph
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2048, 2048), np.float16), "more"))
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    assert faults(check_run(model, given({"X": x}))) == {}


LOADS = [case for case in CASES.values() if case.loads]


@pytest.mark.slow
@every(case=LOADS, parts=12)
def test_conversions_of_the_corpus_are_not_accused(case):
    """Unless the original goes wrong on the same inputs."""
    model, samples = case.build(), given(case.inputs())
    before, seen = check_run(model, samples), {model.SerializeToString()}
    assert before.skipped is None
    for level, dtype in product(LEVELS, LOW):
        try:
            low = converted(case.name, level, dtype=dtype)
        except OpsetError:
            continue
        if low.SerializeToString() in seen:  # levels often make the same of a model
            continue
        seen.add(low.SerializeToString())
        after = check_run(low, samples)
        assert after.skipped is None
        if before.first_bad is None:
            assert after.first_bad is None, level


@pytest.mark.mostly_slow(fast=8)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_conversions_of_the_models_are_not_accused(path, level, dtype):
    run = check_run(convert_model(path, level, dtype=dtype), given(*model_feeds(path.stem)))
    assert run.skipped is None
    assert run.first_bad is None
    assert run.samples == len(model_feeds(path.stem))


# --- how it is asked ------------------------------------------------------------------------------------------


def two_faults():
    return low_model(
        """(float[N,M] X) => (float[N,M] Y, float[N,M] Z) {
            [pow] p = Pow (X, two) [root] Y = Sqrt (p) [exp] e = Exp (X) [log] Z = Log (e)
        }""",
        {"two": [2.0]},
        "float16",
    )


def test_op_filters():
    samples = given({"X": rows_of(300, 1)})
    every = check_run(two_faults(), samples)
    assert faults(every) == {"p": "Inf", "e": "Inf"}
    only = check_run(two_faults(), samples, ops=OpFilter(only=frozenset({"Exp", "Log"})))
    assert [row.op for row in only.values] == ["Exp", "Log"]
    assert only.first_bad.node == "exp"
    skip = check_run(two_faults(), samples, ops=OpFilter(skip=frozenset({"Pow"})))
    assert (skip.first_bad.node, "Pow" in {row.op for row in skip.values}) == ("exp", False)
    both = OpFilter(frozenset({"Pow", "Exp"}), frozenset({"Pow", "Exp"}))
    assert check_run(two_faults(), samples, ops=both).first_bad is None


@pytest.mark.parametrize("budget", [0, 2**30])
def test_stop(budget):
    told = []
    run = check_run(
        two_faults(), given({"X": rows_of(300, 1)}), stop=True, budget=budget, progress=lambda *args: told.append(args)
    )
    assert run.first_bad.node == "pow"
    assert len(run.values) == (1 if budget == 0 else 4)
    assert told == sorted(told)
    done, total = told[-1]
    assert (done < total) == (budget == 0)


def test_a_filtered_fault_does_not_stop():
    run = check_run(
        two_faults(), given({"X": rows_of(300, 1)}), stop=True, budget=0, ops=OpFilter(skip=frozenset({"Pow"}))
    )
    assert run.first_bad.node == "exp"


def test_several_samples():
    text, weights, x, _, _ = BAD["rms_norm_ends_in_zeros"]
    model = low_model(text, weights, "float16")
    good, bad = {"X": x / 100}, {"X": x}
    assert check_run(model, given(good, good)).first_bad is None
    run = check_run(model, given(good, bad, good))
    assert run.first_bad.node == "square"
    row = run.values[0]
    assert (run.samples, row.measured.elements, row.measured.found_inf) == (3, 9, 3)
    assert check_run(model, given(good, bad), stop=True).first_bad.node == "square"


def test_made_up_samples_are_counted_and_seeded():
    text, weights, _, _, _ = BAD["rms_norm_ends_in_zeros"]
    model = low_model(text, weights, "float16")
    one, two = (check_run(model, count=2, seed=5, dims={"N": 4, "R": 2}) for _ in range(2))
    assert one == two
    assert one.samples == 2
    assert one.values[0].measured.elements == 16


@pytest.mark.parametrize("dtype", LOW)
def test_the_budget_changes_nothing(dtype):
    for name in ("exp_in_float32_too", "weight_is_infinite", "square_root_of_a_negative_number"):
        text, weights, x, _, _ = BAD[name]
        runs = [check_run(low_model(text, weights, dtype), given({"X": x}), budget=size) for size in (0, 10, 2**40)]
        assert runs[0] == runs[1] == runs[2]


def test_what_does_not_run_is_said():
    model = parse("(float[2,3] X) => (float[a,b] Y) { Y = MatMul (X, X) }")
    run = check_run(model)
    assert run.skipped.startswith("The model does not run: ")
    assert "--inputs" in run.skipped
    with pytest.raises(ArgumentError, match=r"The model does not run: .* Check the inputs"):
        check_run(model, given({"X": np.ones((2, 3), np.float32)}))
    with pytest.raises(ArgumentError, match="'Z'"):
        check_run(model, given({"Z": np.ones(3, np.float32)}))


def test_the_model_is_not_changed():
    text, weights, x, _, _ = BAD["exp"]
    model = low_model(text, weights, "float16")
    before = onnx.ModelProto()
    before.CopyFrom(model)
    check_run(model, given({"X": x}))
    assert model == before
