"""Programs come in from every format, with the right tasks and numbers, and bad ones say what to do."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

import pretune
from pretune.compile import compile_program, export_library, run_program
from pretune.errors import EnvironmentFaultError, InputError, MissingExtraError, OptionError
from pretune.intake import (
    load_program,
    make_task,
    onnx_files,
    parse_shape_options,
    select_tasks,
)
from pretune.intake.program import program_from_relax
from pretune.intake.task import lower_passes
from pretune_export.torch_programs import program_from_exported

TARGET = tvm.target.Target({"kind": "llvm", "num-cores": 2})
DEMO = Path(pretune.__file__).parent / "demo" / "digits.onnx"
RNG = np.random.default_rng(0)

MATMUL = """
from tvm.script import tirx as T

@T.prim_func(s_tir=True)
def {name}(
    A: T.Buffer(({n}, 32), "float32"), B: T.Buffer((32, 16), "float32"), C: T.Buffer(({n}, 16), "float32")
):
    for i, j, k in T.grid({n}, 16, 32):
        with T.sblock("matmul"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
"""


def fails(error: type[Exception], *words: str):
    """Expect an error whose message is one line that has these words."""
    return pytest.raises(error, match=r"\A(?=[^\n]*\Z)" + "".join(f"(?=.*(?:{word}))" for word in words))


def script(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


def matmul(path: Path, name: str = "matmul", n: int = 8):
    """The program of a TVMScript file with one matrix product."""
    return load_program(script(path / f"{name}_{n}.py", MATMUL.format(name=name, n=n)), target=TARGET)


def weight(name: str, *shape: int, low: float = -1.0) -> TensorProto:
    return numpy_helper.from_array(RNG.uniform(low, 1.0, shape).astype("float32"), name)


def network(**dims: object) -> onnx.ModelProto:
    """Conv, batch norm, relu, pool, fully connected, and a second input added at the end.

    Names are no identifiers, the weight of the linear layer is stored transposed, the batch is dynamic.
    """
    nodes = [
        helper.make_node("Conv", ["image.1", "conv/w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "fc/w", "fc/b"], ["g"], transB=1),
        helper.make_node("Add", ["g", "0:offset"], ["out:0"]),
    ]
    weights = [
        weight("conv/w", 8, 3, 3, 3),
        *(weight(name, 8) for name in ("scale", "bias", "mean")),
        weight("var", 8, low=0.5),
        weight("fc/w", 5, 8),
        weight("fc/b", 5),
    ]
    inputs = [
        helper.make_tensor_value_info("image.1", TensorProto.FLOAT, ["batch", 3, 8, 8]),
        helper.make_tensor_value_info("0:offset", TensorProto.FLOAT, [1, 5]),
    ]
    outputs = [helper.make_tensor_value_info("out:0", TensorProto.FLOAT, ["batch", 5])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def one_node(op: str, domain: str = "", **attributes: object) -> onnx.ModelProto:
    """A model of one operator from x [2, 3] to y."""
    node = helper.make_node(op, ["x"], ["y"], domain=domain, **attributes)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    graph = helper.make_graph([node], "g", [value], [helper.make_empty_tensor_value_info("y")])
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def against_onnxruntime(program, model: bytes | str, **inputs: np.ndarray) -> float:
    """Largest difference between TVM, untuned, and ONNX Runtime."""
    names = [spec.name for spec in program.inputs]
    ours = run_program(compile_program(program, TARGET), [inputs[name] for name in names])
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    theirs = session.run(None, inputs)
    assert len(ours) == len(theirs)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


# --- files --------------------------------------------------------------------------------------------------

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".py", ".json"])
@pytest.mark.parametrize(
    ("contents", "words"),
    [(None, ["does not exist"]), ("", ["is empty"]), (LFS, ["git-LFS pointer", "git lfs pull"])],
)
def test_file_without_contents(tmp_path, suffix, contents, words):
    path = tmp_path / f"model{suffix}"
    if contents is not None:
        path.write_text(contents)
    with fails(InputError, f"model{suffix}", *words):
        load_program(path, target=TARGET)


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".json"])
def test_file_of_something_else(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"<!DOCTYPE html><html>Not found</html>" * 20)
    with fails(InputError, f"model{suffix}", "is not", "again|write it"):
        load_program(path, target=TARGET)


def test_truncated_files(tmp_path):
    contents = DEMO.read_bytes()
    for length in (1, 100, len(contents) // 2, len(contents) - 1):
        (tmp_path / "m.onnx").write_bytes(contents[:length])
        with fails(InputError, "m.onnx", "truncated", "again"):
            load_program(tmp_path / "m.onnx", target=TARGET)
    text = tvm.ir.save_json(matmul(tmp_path).mod)
    (tmp_path / "m.json").write_text(text[: len(text) // 2])
    with fails(InputError, "m.json", "truncated", "save_json"):
        load_program(tmp_path / "m.json", target=TARGET)


def test_folder_and_unknown_kinds(tmp_path):
    (tmp_path / "saved.onnx").mkdir()
    with fails(InputError, "saved.onnx", "is a folder"):
        load_program(tmp_path / "saved.onnx", target=TARGET)
    (tmp_path / "weights.pth").write_bytes(b"PK")
    with fails(InputError, "weights.pth", r"\.onnx", r"torch\.export\.save"):
        load_program(str(tmp_path / "weights.pth"), target=TARGET)
    with fails(InputError, "cannot tune a dict", "PrimFunc"):
        load_program({}, target=TARGET)


def test_external_weights_missing(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(network(), path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert load_program(path, target=TARGET, shapes={"image.1": (1, 3, 8, 8)}).tasks
    (tmp_path / "m.data").unlink()
    with fails(InputError, "m.onnx", "external weights", "m.data", "beside the model"):
        load_program(path, target=TARGET, shapes={"image.1": (1, 3, 8, 8)})


# --- shapes -------------------------------------------------------------------------------------------------


def test_shape_options():
    shapes = parse_shape_options(["x=1x3x48x192", "a=b=2,4", "s="])
    assert shapes == {"x": (1, 3, 48, 192), "a=b": (2, 4), "s": ()}
    for option in ("x", "=1x2", "x=1x", "x=1x-2", "x=axb", "x=1.5"):
        with fails(OptionError, "--shape", "NAME=DIMxDIMx"):
            parse_shape_options([option])
    with fails(OptionError, "at least 1"):
        parse_shape_options(["x=1x0"])
    with fails(OptionError, "'x' two shapes"):
        parse_shape_options(["x=1x2", "x=1x3"])


def test_wrong_shapes():
    model = network()
    with fails(InputError, "'image.1'", r"dimension 0 \(batch\)", r"--shape image\.1=1x3x8x8$"):
        load_program(model, target=TARGET)
    with fails(InputError, "'x', which does not exist", r"image\.1 \(batchx3x8x8\)", "0:offset"):
        load_program(model, target=TARGET, shapes={"x": (1, 3, 8, 8)})
    with fails(InputError, "has 3 dimensions", "'image.1' has 4: batchx3x8x8"):
        load_program(model, target=TARGET, shapes={"image.1": (3, 8, 8)})
    with fails(InputError, "sets dimension 1 to 4", "fixes it at 3"):
        load_program(model, target=TARGET, shapes={"image.1": (1, 4, 8, 8)})


def test_unnamed_dynamic_dimensions_get_an_example():
    model = network()
    for dim in list(model.graph.input[0].type.tensor_type.shape.dim)[2:]:
        dim.Clear()
    with fails(
        InputError, r"dimensions 0 \(batch\), 2 \(\?\), 3 \(\?\)", "image.1=1x3xNxN, with numbers for N"
    ):
        load_program(model, target=TARGET)


# --- ONNX ---------------------------------------------------------------------------------------------------


def test_onnx_network(tmp_path, capfd):
    model = network()
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    program = load_program(path, target=TARGET, shapes={"image.1": (2, 3, 8, 8)})
    assert capfd.readouterr() == ("", "")
    assert (program.name, program.kind, program.source, program.outputs) == ("net", "relax", path, ("out:0",))
    assert [(spec.name, spec.shape, spec.dtype) for spec in program.inputs] == [
        ("image.1", (2, 3, 8, 8), "float32"),
        ("0:offset", (1, 5), "float32"),
    ]
    # Batch norm went into the convolution and the transposition into the weight.
    conv, *rest = program.tasks
    assert conv.name.startswith("fused_conv2d") and conv.name.endswith("relu")
    assert conv.args[1] == ((8, 3, 3, 3), "float32")  # weights are arguments of a task, not part of it
    assert not any(
        word in task.name for task in rest for word in ("norm", "shape", "transpose", "sqrt", "divide")
    )
    assert [task.weight * task.flops for task in program.tasks] == sorted(
        (task.weight * task.flops for task in program.tasks), reverse=True
    )
    inputs = {"image.1": RNG.standard_normal((2, 3, 8, 8)), "0:offset": RNG.standard_normal((1, 5))}
    inputs = {name: array.astype("float32") for name, array in inputs.items()}
    assert against_onnxruntime(program, model.SerializeToString(), **inputs) < 1e-5


def test_models_beyond_two_gigabytes_keep_weights_apart(tmp_path, monkeypatch):
    model = network()
    shapes = {"image.1": (1, 3, 8, 8)}
    expected = load_program(model, target=TARGET, shapes=shapes)
    monkeypatch.setattr(onnx_files, "_EXTERNAL_ABOVE", 0)
    found = load_program(model, target=TARGET, shapes=shapes)
    assert [task.task_id for task in found.tasks] == [task.task_id for task in expected.tasks]
    assert tvm_ffi.structural_equal(found.mod, expected.mod)


def test_unsupported_operators():
    lstm = one_node("Identity")
    lstm.graph.ClearField("node")
    lstm.graph.node.append(helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=4))
    lstm.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 1, 3]))
    lstm.graph.initializer.extend([weight("w", 1, 16, 3), weight("r", 1, 16, 4)])
    with fails(InputError, "lacks the operator LSTM"):
        load_program(lstm, target=TARGET)
    with fails(InputError, "ONNX Runtime cannot load the model", "Nonsense"):
        load_program(one_node("Nonsense", domain="my.ops"), target=TARGET)


def test_failing_conversion_names_the_operator(capfd):
    model = one_node("TopK", sorted=0)
    model.graph.node[0].input.append("k")
    model.graph.node[0].output.append("indices")
    model.graph.initializer.append(numpy_helper.from_array(np.array([2], "int64"), "k"))
    with fails(InputError, "cannot convert the operator TopK", "sorted"):
        load_program(model, target=TARGET)
    assert capfd.readouterr().out == ""


def test_demo_model():
    assert DEMO.stat().st_size < 500_000
    program = load_program(str(DEMO), target=TARGET)
    assert 8 <= len(program.tasks) <= 12
    image = RNG.random((1, 1, 32, 32), dtype=np.float32)
    assert against_onnxruntime(program, str(DEMO), image=image) < 1e-5


def test_real_classifier(tmp_path):
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("rapidocr-onnxruntime is not installed")
    path = Path(spec.submodule_search_locations[0]) / "models" / "ch_ppocr_mobile_v2.0_cls_infer.onnx"
    program = load_program(path, target=TARGET, shapes={"x": (1, 3, 48, 192)})
    assert len(program.tasks) == 53 and sum(task.weight for task in program.tasks) == 66
    image = RNG.standard_normal((1, 3, 48, 192)).astype("float32")
    assert against_onnxruntime(program, str(path), x=image) < 1e-3
    found = found_in_database(program, tmp_path)
    assert len(found) == 53 and all(found)


# --- databases ----------------------------------------------------------------------------------------------


def marked_database(tasks, folder: Path):
    """A stock database with one record for each task, whose schedule leaves a mark."""
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(folder))
    for task in tasks:
        schedule = tvm.s_tir.Schedule(task.mod)
        schedule.annotate(schedule.get_child_blocks(schedule.get_sblock("root"))[0], "marked", 1)
        args = ms.arg_info.ArgInfo.from_prim_func(task.mod["main"])
        workload = database.commit_workload(task.mod)
        database.commit_tuning_record(
            ms.database.TuningRecord(schedule.trace, workload, [1e-3], TARGET, args)
        )
    return ms.database.JSONDatabase(work_dir=str(folder))


def found_in_database(program, folder: Path) -> list[bool]:
    """For each function of the lowered program, whether stock TVM finds its record."""
    from tvm import relax, tirx

    database = marked_database(program.tasks, folder)
    with TARGET, database, tvm.transform.PassContext(opt_level=3):
        mod = tvm.transform.Sequential(lower_passes(TARGET))(program.mod)
        mod = relax.transform.MetaScheduleApplyDatabase()(mod)
    funcs = [mod[var] for var in mod.get_global_vars()]
    funcs = [func for func in funcs if isinstance(func, tirx.PrimFunc)]
    # Reshapes become views, and no tasks.
    return ['"marked"' in func.script() for func in funcs if not relax.analysis.has_reshape_pattern(func)]


def test_stock_database_applies(tmp_path):
    program = load_program(network(), target=TARGET, shapes={"image.1": (1, 3, 8, 8)})
    found = found_in_database(program, tmp_path)
    assert len(found) >= 3 and all(found)
    database = marked_database(program.tasks, tmp_path)
    x, offset = np.ones((1, 3, 8, 8), "float32"), np.ones((1, 5), "float32")
    tuned, plain = (run_program(compile_program(program, TARGET, db), [x, offset]) for db in (database, None))
    np.testing.assert_allclose(tuned[0], plain[0], rtol=1e-5)


def test_prim_func_under_its_own_name_is_found(tmp_path):
    from tvm.s_tir import meta_schedule as ms

    program = matmul(tmp_path, name="product")
    database = marked_database(program.tasks, tmp_path)
    schedule = ms.tir_integration.compile_tir(database, program.mod, TARGET)
    assert schedule is not None and "marked" in schedule.mod.script()
    a, b, c = (tvm.runtime.tensor(RNG.random(shape, dtype=np.float32)) for shape, _ in program.tasks[0].args)
    compile_program(program, TARGET, database)["product"](a, b, c)
    np.testing.assert_allclose(c.numpy(), a.numpy() @ b.numpy(), rtol=1e-5)


# --- task identity ------------------------------------------------------------------------------------------


def test_task_id_ignores_names_and_weights(tmp_path):
    one, other, larger = matmul(tmp_path, "one"), matmul(tmp_path, "other"), matmul(tmp_path, "one", n=9)
    assert one.tasks[0].task_id == other.tasks[0].task_id != larger.tasks[0].task_id
    first, second = (
        load_program(network(), target=TARGET, shapes={"image.1": (1, 3, 8, 8)}) for _ in range(2)
    )  # RNG goes on: other weights
    assert [task.task_id for task in first.tasks] == [task.task_id for task in second.tasks]


def test_task_id_is_the_same_in_every_process():
    program = load_program(DEMO, target=TARGET)
    code = (
        "import sys, tvm; from pretune.intake import load_program\n"
        "target = tvm.target.Target({'kind': 'llvm', 'num-cores': 2})\n"
        "print(*(t.name + ':' + t.task_id for t in load_program(sys.argv[1], target=target).tasks))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(DEMO)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [f"{task.name}:{task.task_id}" for task in program.tasks]


def test_equal_layers_are_one_task():
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(3)]
    exported = torch.export.export(torch.nn.Sequential(*layers).eval(), (torch.ones(4, 16),))
    (task,) = program_from_exported(exported).tasks
    assert task.weight == 3 and task.flops == pytest.approx(2 * 4 * 16 * 16, rel=0.2)
    assert task.args == (
        ((4, 16), "float32"),
        ((16, 16), "float32"),
        ((16,), "float32"),
        ((4, 16), "float32"),
    )


def test_select_tasks(tmp_path):
    tasks = load_program(DEMO, target=TARGET).tasks
    convs = select_tasks(tasks, "*conv2d*")
    assert 0 < len(convs) < len(tasks) and all("conv2d" in task.name for task in convs)
    assert select_tasks(tasks, None) == tasks
    with fails(OptionError, "no task matches 'dense'", "fused_matmul", "and 1 more"):
        select_tasks(tasks, "dense")


# --- PyTorch ------------------------------------------------------------------------------------------------


def conv_norms(torch):
    """Convolutions of every rank with a batch norm that has statistics; one is read a second time."""
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(
                [
                    nn.Conv1d(3, 8, 3, bias=False),
                    nn.Conv2d(4, 8, 3, bias=True, groups=2),
                    nn.Conv3d(2, 4, 2, bias=True),
                    nn.Conv2d(4, 4, 1),
                ]
            )
            self.norms = nn.ModuleList(
                [nn.BatchNorm1d(8), nn.BatchNorm2d(8), nn.BatchNorm3d(4, affine=False), nn.BatchNorm2d(4)]
            )

        def forward(self, x1, x2, x3):
            xs = (x1, x2, x3)
            first, second, third = (self.norms[i](self.convs[i](xs[i])).relu() for i in range(3))
            shared = self.convs[3](x2)
            return first, second, third, self.norms[3](shared) * shared

    torch.manual_seed(0)
    net = Net().eval()
    for norm in net.norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        if norm.affine:
            norm.weight.data.uniform_(0.5, 2.0)
            norm.bias.data.normal_()
    return net, (torch.randn(2, 3, 9), torch.randn(1, 4, 6, 6), torch.randn(1, 2, 4, 4, 4))


def test_batch_norms_are_folded_into_convolutions(tmp_path):
    torch = pytest.importorskip("torch")
    net, inputs = conv_norms(torch)
    path = tmp_path / "norms.pt2"
    torch.export.save(torch.export.export(net, inputs), path)
    program = load_program(path, target=TARGET)
    assert (program.name, len(program.inputs)) == ("norms", 3)
    names = [task.name for task in program.tasks]
    assert sum(bool(re.fullmatch(r"fused_conv\dd\d*_add\d*_relu\d*", name)) for name in names) == 3, names
    # The convolution that is read twice is computed once.
    assert sum("conv" in name for name in names) == 4, names
    outputs = run_program(compile_program(program, TARGET), [x.numpy() for x in inputs])
    for ours, theirs in zip(outputs, net(*inputs), strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_of_pytorch_accumulates_in_float32(dtype):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(2, 3, 3)
            self.norm = torch.nn.BatchNorm2d(3)
            self.linear = torch.nn.Linear(4, 5)
            self.last = torch.nn.LayerNorm(5)

        def forward(self, x):
            return self.last(self.linear(torch.relu(self.norm(self.conv(x))))) @ x.new_ones(5, 4)

    torch.manual_seed(0)
    net = Net().to(getattr(torch, dtype)).eval()
    batch = (net.norm.running_mean, net.norm.running_var, net.norm.weight, net.norm.bias)
    for values in (*batch, net.last.weight, net.last.bias):
        torch.nn.init.uniform_(values, 0.5, 2.0)
    x = torch.randn(1, 2, 6, 6, dtype=getattr(torch, dtype))
    program = program_from_exported(torch.export.export(net, (x,)))
    products = [task for task in program.tasks if re.search("conv2d|matmul", task.name)]
    assert len(products) == 3 and {task.args[0][1] for task in products} == {dtype}
    conv = next(task for task in program.tasks if "conv2d" in task.name)
    assert "float32" in conv.mod.script()
    assert re.fullmatch(r"fused_conv2d\d*_add\d*_cast\d*_relu\d*", conv.name), conv.name  # the norm is folded
    (output,) = run_program(
        compile_program(program, TARGET), [x.float().numpy().astype(getattr(ml_dtypes, dtype, dtype))]
    )
    assert str(output.dtype) == dtype
    np.testing.assert_allclose(
        output.astype("float32"), net(x).detach().float().numpy(), rtol=0.05, atol=0.05
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_norm_of_a_constant(dtype):
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x):
            return x + self.norm(torch.arange(32.0).reshape(4, 8).sin().to(x.dtype))

    net = Net().to(getattr(torch, dtype)).eval()
    x = torch.randn(4, 8, dtype=getattr(torch, dtype))
    program = program_from_exported(torch.export.export(net, (x,)))
    given = x.float().numpy().astype(getattr(ml_dtypes, dtype, dtype))
    (output,) = run_program(compile_program(program, TARGET), [given])
    expected = net(x).detach().float().numpy()
    np.testing.assert_allclose(output.astype("float32"), expected, rtol=0.05, atol=0.05)


def test_an_operator_without_a_program_for_its_types_is_an_input_error():
    from tvm import relax

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 64), "bfloat16"))
    with builder.function("main", [x]):
        one = relax.const(np.ones(64, dtype=ml_dtypes.bfloat16))
        builder.emit_func_output(builder.emit(relax.op.nn.layer_norm(x, one, one, axes=-1)))
    with pytest.raises(InputError, match=r"net: TVM cannot compile this program: .*layer_norm"):
        program_from_relax(builder.get(), target=TARGET, name="net")


def test_constant_subgraphs_of_pytorch_are_folded():
    torch = pytest.importorskip("torch")

    class Masked(torch.nn.Module):
        def forward(self, x):
            position = torch.arange(x.shape[1])
            block = (position % 3 == 0).cumsum(0)  # TVM cannot compile a sum of booleans
            mask = (position[:, None] >= position) & (block[:, None] == block)
            return torch.where(mask, x @ x.mT, -1.0).softmax(-1)

    x = torch.randn(2, 6, 4)
    program = program_from_exported(torch.export.export(Masked(), (x,)))
    folded = ("arange", "cumsum", "equal", "remainder")
    assert not any(word in task.name for task in program.tasks for word in folded)
    (output,) = run_program(compile_program(program, TARGET), [x.numpy()])
    np.testing.assert_allclose(output, Masked()(x).numpy(), atol=1e-5)


def test_dynamic_pytorch_dimensions_take_values():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softmax(-1)).eval()
    batch = torch.export.Dim("n", min=2)
    exported = torch.export.export(net, (torch.ones(3, 8),), dynamic_shapes=({0: batch},))
    with fails(InputError, "'input'", r"dimension 0", "--shape input=1x8"):
        program_from_exported(exported)
    program = program_from_exported(exported, shapes={"input": (5, 8)})
    x = np.ones((5, 8), "float32")
    (output,) = run_program(compile_program(program, TARGET), [x])
    np.testing.assert_allclose(output, net(torch.from_numpy(x)).detach().numpy(), atol=1e-6)


def test_pytorch_errors(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    with fails(InputError, "torch.nn.Module", r"torch\.export\.export\(model"):
        load_program(torch.nn.Linear(2, 2), target=TARGET)

    class Median(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x)

    training = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3))
    with fails(InputError, "updates 1.num_batches_tracked", r"model\.eval\(\)"):
        program_from_exported(torch.export.export(training, (torch.ones(1, 3, 4, 4),)))
    with fails(InputError, "cannot import this PyTorch program", "eig"):
        program_from_exported(torch.export.export(Median(), (torch.eye(3),)))
    (tmp_path / "m.pt2").write_bytes(b"PK")
    monkeypatch.setitem(sys.modules, "torch", None)
    with fails(MissingExtraError, "m.pt2", r"pip install 'pretune\[export\]'"):
        load_program(tmp_path / "m.pt2", target=TARGET)


# --- TVMScript, JSON, objects -------------------------------------------------------------------------------


def test_tvmscript_prim_func(tmp_path):
    program = matmul(tmp_path, name="product")
    (task,) = program.tasks
    assert (program.name, program.kind, task.name, task.weight) == ("product_8", "tir", "product", 1)
    assert task.flops == 2 * 8 * 16 * 32
    assert [spec.name for spec in program.inputs] == ["A", "B", "C"]
    assert task.args == (((8, 32), "float32"), ((32, 16), "float32"), ((8, 16), "float32"))
    again = load_program(program.mod["main"], target=TARGET)
    assert again.tasks[0].task_id == task.task_id
    with fails(InputError, "'D', which does not exist", "A"):
        load_program(program.mod["main"], target=TARGET, shapes={"D": (1,)})


def test_several_programs_in_a_file(tmp_path):
    two = MATMUL.format(name="first", n=8) + MATMUL.format(name="second", n=4)
    path = script(tmp_path / "two.py", two)
    with fails(InputError, "two.py", "several", r"\(first, second\)", "main"):
        load_program(path, target=TARGET)
    chosen = load_program(script(path, two + "main = second\n"), target=TARGET)
    assert chosen.tasks[0].args[0] == ((4, 32), "float32")
    with fails(InputError, "none.py", "defines no PrimFunc"):
        load_program(script(tmp_path / "none.py", "x = 1\n"), target=TARGET)


def test_failing_file_names_the_line(tmp_path):
    with fails(InputError, "bad.py fails in line 2: ZeroDivisionError"):
        load_program(script(tmp_path / "bad.py", "x = 1\ny = x / 0\n"), target=TARGET)
    with fails(InputError, "bad.py fails", "SyntaxError"):
        load_program(script(tmp_path / "bad.py", "def f(:\n"), target=TARGET)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            """
            def f(a: T.handle, n: T.int32):
                A = T.match_buffer(a, (16, n))
                for i, j in T.grid(16, n):
                    with T.sblock("b"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        A[vi, vj] = T.float32(1)
            """,
            ["dimension 1 of buffer A is dynamic", "specialize"],
        ),
        (
            """
            def f(A: T.Buffer((16,), "float32"), x: T.float32):
                for i in range(16):
                    with T.sblock("b"):
                        vi = T.axis.spatial(16, i)
                        A[vi] = x
            """,
            ["argument x is a scalar", "specialize"],
        ),
        (
            """
            def f(A: T.Buffer((16,), "float32")):
                for i in range(16):
                    A[i] = T.float32(1)
            """,
            ["no block to tune", "sblock"],
        ),
        (
            """
            def f(A: T.Buffer((16,), "float32")):
                T.func_attr({"tirx.is_scheduled": True})
                for i in range(16):
                    with T.sblock("b"):
                        vi = T.axis.spatial(16, i)
                        A[vi] = T.float32(1)
            """,
            ["scheduled already"],
        ),
    ],
)
def test_untunable_functions(tmp_path, body, words):
    text = "from tvm.script import tirx as T\n@T.prim_func(s_tir=True)" + textwrap.dedent(body)
    with fails(InputError, "f: ", *words):
        load_program(script(tmp_path / "f.py", text), target=TARGET)


RELAX = """
from tvm.script import ir as I, relax as R

@I.ir_module
class Net:
    @R.function
    def {name}(x: R.Tensor(({n}, 8), "float32"), y: R.Tensor(({n}, 8), "float32")) -> R.Tensor:
        with R.dataflow():
            z = R.nn.relu(R.add(x, y))
            R.output(z)
        return z
"""


def test_relax_modules(tmp_path):
    path = script(tmp_path / "net.py", RELAX.format(name="forward", n='"n"'))
    with fails(InputError, r"dimension 0 \(n\)", "--shape x=1x8"):
        load_program(path, target=TARGET)
    with fails(InputError, "n both 4 and 5"):
        load_program(path, target=TARGET, shapes={"x": (4, 8), "y": (5, 8)})
    program = load_program(path, target=TARGET, shapes={"x": (4, 8), "y": (4, 8)})
    assert program.kind == "relax" and [task.args[0] for task in program.tasks] == [((4, 8), "float32")]
    x, y = (RNG.standard_normal((4, 8)).astype("float32") for _ in range(2))
    (output,) = run_program(compile_program(program, TARGET), [x, y])
    np.testing.assert_allclose(output, np.maximum(x + y, 0))
    (tmp_path / "net.json").write_text(tvm.ir.save_json(program.mod))
    again = load_program(tmp_path / "net.json", target=TARGET)
    assert [task.task_id for task in again.tasks] == [task.task_id for task in program.tasks]


def test_json_of_something_else(tmp_path):
    program = matmul(tmp_path)
    path = tmp_path / "m.json"
    path.write_text(tvm.ir.save_json(program.mod["main"]))
    assert load_program(path, target=TARGET).tasks[0].task_id == program.tasks[0].task_id
    path.write_text(tvm.ir.save_json(tvm.tirx.IntImm("int32", 3)))
    with fails(InputError, "m.json holds a IntImm, not a PrimFunc"):
        load_program(path, target=TARGET)


def test_programs_without_tasks():
    with fails(InputError, "nothing to tune"):
        load_program(one_node("Identity"), target=TARGET)


# --- compiling ----------------------------------------------------------------------------------------------


def test_library_runs_in_a_fresh_virtual_machine(tmp_path, capfd, monkeypatch):
    program = load_program(network(), target=TARGET, shapes={"image.1": (1, 3, 8, 8)})
    inputs = [np.ones((1, 3, 8, 8), "float32"), np.ones((1, 5), "float32")]
    executable = compile_program(program, TARGET)
    library = export_library(executable, tmp_path / "model.so")
    np.testing.assert_array_equal(run_program(library, inputs)[0], run_program(executable, inputs)[0])
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    with fails(EnvironmentFaultError, "model.so", r"C\+\+ compiler", r"apt-get install g\+\+"):
        export_library(executable, tmp_path / "model.so")


def test_make_task_of_a_te_function():
    from tvm import te

    x = te.placeholder((4, 4), name="x")
    func = te.create_prim_func([x, te.compute((4, 4), lambda i, j: x[i, j] * 2.0, name="y")])
    task = make_task("double", func, weight=3)
    assert (task.weight, task.args) == (3, (((4, 4), "float32"),) * 2)
