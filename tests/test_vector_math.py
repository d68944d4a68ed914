"""Elementary functions as arithmetic: accuracy, what they replace, and that all else stays stock."""

import math

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.s_tir import meta_schedule as ms

from pretune.compile import compile_program, run_program
from pretune.intake import load_program
from pretune.records import target_key
from pretune.vector_math import vectorise
from programs import TARGET, softmax

RNG = np.random.default_rng(0)

EXACT = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
}
TINY = np.finfo(np.float32).tiny
MOST_ULP = {"exp": 1, "sigmoid": 3, "tanh": 7, "erf": 7}


def elementwise(name: str, size: int, lanes: int = 1, dtype: str = "float32") -> tvm.IRModule:
    """An elementary function over a vector, `lanes` elements at once."""
    a = te.placeholder((size,), dtype, name="A")
    b = te.compute((size,), lambda i: getattr(tirx, name)(a[i]), name="B")
    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b])}))
    (loop,) = schedule.get_loops(schedule.get_sblock("B"))
    schedule.vectorize(schedule.split(loop, [None, lanes])[1])
    return schedule.mod


def calls(mod: tvm.IRModule) -> bool:
    return any(f"T.{name}(" in mod.script() for name in EXACT)


def run(mod: tvm.IRModule, target: tvm.target.Target, x: np.ndarray) -> np.ndarray:
    y = tvm.runtime.tensor(np.full_like(x, 7.0))
    tvm.compile(mod, target=target)["main"](tvm.runtime.tensor(x), y)
    return y.numpy()


def runs_here(mcpu: str) -> bool:
    features = tvm.get_global_func("target.llvm_cpu_has_feature")
    return all(features(name, TARGET) for name in {"x86-64-v3": ["avx2", "fma"]}.get(mcpu, ["sse4.2"]))


@pytest.fixture(scope="module")
def arguments() -> np.ndarray:
    """Dense where results change, every magnitude down to denormals, and the borders of each formula."""
    n = 1 << 16
    spread = RNG.choice((-1.0, 1.0), n) * np.exp2(RNG.uniform(-149, 128, n))
    dense = [np.linspace(-105, 90, 4 * n), np.linspace(-9, 9, 4 * n), np.linspace(-0.1, 0.1, n)]
    borders = np.array([88.72283, -87.33654, 8.0, -8.0, 3.598, -3.598, 3.4e38, -3.4e38], np.float32)
    around = [np.nextafter(borders, np.float32(to)) for to in (-np.inf, np.inf)]
    return np.concatenate([spread, *dense, borders, *around]).astype(np.float32)


@pytest.mark.parametrize("mcpu", ["", "x86-64-v2", "x86-64-v3"])
@pytest.mark.parametrize("name", EXACT)
def test_accuracy(name, mcpu, arguments):
    target = TARGET
    if mcpu:
        if not runs_here(mcpu):
            pytest.skip(f"this machine is no {mcpu}")
        target = tvm.target.Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 1})
    size = len(arguments) // 16 * 16
    x = arguments[-size:]
    got = run(vectorise(elementwise(name, size, lanes=16), target), target, x)
    with np.errstate(all="ignore"):
        want = EXACT[name](x.astype(np.float64))
        infinite = np.isinf(want.astype(np.float32))
        error = np.abs(got - want)
        ulp = np.spacing(np.abs(want).astype(np.float32))
    assert (got[infinite] == np.inf).all()
    denormal = np.abs(want) < TINY
    assert (error[denormal] <= TINY).all()
    assert (error / ulp)[~infinite & ~denormal].max() <= MOST_ULP[name]
    if name != "exp":
        assert np.abs(got).max() == 1.0  # never above


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("exp", [1.0, 1.0, np.inf, 0.0]),
        ("sigmoid", [0.5, 0.5, 1.0, 0.0]),
        ("tanh", [0.0, -0.0, 1.0, -1.0]),
        ("erf", [0.0, -0.0, 1.0, -1.0]),
    ],
)
def test_special_values(name, values):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e9, -1e9, -0.0], np.float32)
    got = run(vectorise(elementwise(name, 8, lanes=8), TARGET), TARGET, x)
    np.testing.assert_array_equal(got, np.array([*values, np.nan, *values[2:], values[1]], np.float32))
    np.testing.assert_array_equal(np.signbit(got[:2]), np.signbit(values[:2]))


@pytest.mark.parametrize(("exponent", "replaced"), [(3.0, True), (2.5, False)])
def test_cubes_alone_among_powers(exponent, replaced):
    a = te.placeholder((64,), "float32", name="A")
    b = te.compute((64,), lambda i: tirx.pow(a[i], tirx.const(exponent, "float32")), name="B")
    made = vectorise(tvm.IRModule({"main": te.create_prim_func([a, b])}), TARGET)
    assert ("T.pow" not in made.script()) == replaced
    x = np.abs(RNG.normal(0, 3, 64)).astype(np.float32)
    np.testing.assert_allclose(run(made, TARGET, x), x.astype(np.float64) ** exponent, rtol=5e-7)


def test_other_types_targets_and_wishes_keep_their_functions(monkeypatch):
    mod = elementwise("exp", 64)
    assert calls(mod) and not calls(vectorise(mod, TARGET))
    assert calls(vectorise(elementwise("exp", 64, dtype="float64"), TARGET))
    assert calls(vectorise(mod, tvm.target.Target("c")))
    assert calls(vectorise(mod, tvm.target.Target({"kind": "llvm", "fast-math": True})))
    key = target_key(TARGET)
    monkeypatch.setenv("PRETUNE_EXACT_MATH", "1")
    assert calls(vectorise(mod, TARGET))
    assert target_key(TARGET) != key  # latencies of the two do not mix


def test_a_function_of_a_function():
    a = te.placeholder((64,), "float32", name="A")
    b = te.compute((64,), lambda i: tirx.exp(tirx.tanh(tirx.exp(a[i])) * tirx.erf(a[i])), name="B")
    x = RNG.normal(0, 1, 64).astype(np.float32)
    got = run(vectorise(tvm.IRModule({"main": te.create_prim_func([a, b])}), TARGET), TARGET, x)
    wide = x.astype(np.float64)
    want = np.exp(np.tanh(np.exp(wide)) * EXACT["erf"](wide))
    np.testing.assert_allclose(got, want, rtol=3e-6)


def test_a_whole_network_with_a_database():
    x = relax.Var("x", relax.TensorType((8, 32), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(relax.op.nn.softmax(x)))
        builder.emit_func_output(output)
    program = load_program(builder.get(), target=TARGET)
    empty = ms.database.MemoryDatabase()
    value = RNG.normal(0, 3, (8, 32)).astype(np.float32)
    found = {}
    for name, database in (("stock", None), ("ours", empty)):
        made = compile_program(program, TARGET, database)
        found[name] = run_program(made, [value])[0]
        assert ("llvm.exp" in made.mod.imports[0].inspect_source("ll")) == (name == "stock")
    np.testing.assert_allclose(found["ours"], found["stock"], rtol=1e-6)


def test_unrolled_and_parallel_loops():
    """Each copy of an unrolled body binds variables of its own."""
    schedule = tvm.s_tir.Schedule(softmax(8, 32))
    block = schedule.get_sblock("T_softmax_exp")
    i, j = schedule.get_loops(block)
    schedule.parallel(i)
    outer, inner = schedule.split(j, [None, 8])
    schedule.unroll(outer)
    schedule.vectorize(inner)
    x = RNG.normal(0, 5, (8, 32)).astype(np.float32)
    got = run(vectorise(schedule.mod, TARGET), TARGET, x)
    want = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(got, want / want.sum(1, keepdims=True), rtol=3e-6)
