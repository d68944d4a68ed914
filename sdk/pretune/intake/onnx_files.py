"""ONNX models: checked, given static shapes, simplified by ONNX Runtime, imported into Relax."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import tvm

from pretune.errors import InputError, one_line
from pretune.intake.files import check_file
from pretune.intake.program import Program, Shapes, check_shapes, program_from_relax
from pretune.native_log import quiet_native

# A protobuf message holds 2 GB at most; beyond this many bytes, weights go into a file of their own.
_EXTERNAL_ABOVE = 1_500_000_000


def program_from_onnx(
    source: Path | onnx.ModelProto,
    *,
    target: tvm.target.Target,
    name: str | None = None,
    shapes: Shapes | None = None,
) -> Program:
    """Import an ONNX model.

    Parameters
    ----------
    source : Path or onnx.ModelProto
        The model; weights in external files are looked for beside it.
    target : tvm.target.Target
        What it will be compiled for.
    name : str, optional
        Name of the program; the file's stem or the graph's name if absent.
    shapes : mapping of str to sequence of int, optional
        Shapes of the inputs that have dynamic dimensions.

    Raises
    ------
    InputError
        For a file that is no model, a shape that is missing or does not fit, an operator that TVM lacks.
    """
    path = source if isinstance(source, Path) else None
    model = source if isinstance(source, onnx.ModelProto) else load_onnx(source)
    name = name or (path.stem if path else model.graph.name or "model")
    label = str(path or name)
    fixed = check_shapes(_declared(model, label), shapes or {})
    outputs = [output.name for output in model.graph.output]
    model = simplify(freeze(model, fixed), label)
    return program_from_relax(
        _import(model, label),
        target=target,
        name=name,
        input_names=list(fixed),
        outputs=outputs,
        source=path,
    )


def load_onnx(path: Path) -> onnx.ModelProto:
    """Read an ONNX file with its external weights.

    Raises
    ------
    InputError
        If it is missing, empty, truncated, no ONNX model, a git-LFS pointer, or lacks its external weights.
    """
    from google.protobuf.message import DecodeError

    check_file(path)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except DecodeError as error:
        raise InputError(
            f"{path} is not an ONNX model, or is truncated; download or export it again"
        ) from error
    if not model.graph.node or not model.opset_import:
        raise InputError(f"{path} holds no ONNX graph, or is truncated; download or export it again")
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (
        Exception
    ) as error:  # onnx raises its checker's error, OSError or ValueError for a missing or short file
        raise InputError(
            f"{path}: external weights cannot be read: {one_line(error)}; put it beside the model"
        ) from error
    return model


def freeze(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Copy of a model with the inputs' shapes set, and no other shape left that could contradict them."""
    frozen = onnx.ModelProto()
    frozen.CopyFrom(model)
    for value in frozen.graph.input:
        if value.name in shapes:
            shape = value.type.tensor_type.shape
            shape.ClearField("dim")
            for size in shapes[value.name]:
                shape.dim.add().dim_value = size
    for value in frozen.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    frozen.graph.ClearField("value_info")
    return frozen


def simplify(model: onnx.ModelProto, label: str) -> onnx.ModelProto:
    """Fold constants and conv + batch norm, and infer shapes, through ONNX Runtime's basic optimisations.

    These keep to the operators of the ONNX standard, which is what TVM imports.

    Raises
    ------
    InputError
        If ONNX Runtime cannot load the model.
    """
    import onnxruntime

    large = model.ByteSize() > _EXTERNAL_ABOVE
    with tempfile.TemporaryDirectory(prefix="pretune-onnx-") as folder:
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        onnx.save(model, str(before), save_as_external_data=large, location="before.data" if large else None)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(after)
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        if large:
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "after.data"
            )
        try:
            onnxruntime.InferenceSession(str(before), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise InputError(f"{label}: ONNX Runtime cannot load the model: {_ort_message(error)}") from error
        return onnx.load(str(after))


def _declared(model: onnx.ModelProto, label: str) -> dict[str, list[int | str]]:
    """Inputs without the weights, each dimension a number or the name of a dynamic one."""
    weights = {tensor.name for tensor in model.graph.initializer}
    declared: dict[str, list[int | str]] = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        if not value.type.HasField("tensor_type"):
            kind = value.type.WhichOneof("value") or "untyped"
            raise InputError(f"{label}: input {value.name!r} is a {kind}; only tensors can be tuned")
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            raise InputError(
                f"{label}: input {value.name!r} has no shape at all; set one and export the model again"
            )
        declared[value.name] = [
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value > 0 else dim.dim_param or "?"
            for dim in tensor.shape.dim
        ]
    return declared


def _import(model: onnx.ModelProto, label: str) -> tvm.IRModule:
    from tvm.relax.frontend.onnx import from_onnx

    printed = io.StringIO()
    try:
        # TVM prints to stdout which operator it failed at, and warns of every input it renames.
        with quiet_native(), contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return from_onnx(model, keep_params_in_input=False)  # pyright: ignore[reportArgumentType]
    except tvm.error.OpNotImplemented as error:
        names = str(error).rpartition(": ")[2]
        raise InputError(
            f"{label}: TVM's ONNX importer lacks the operator {names}; tune a part of the model without it"
        ) from error
    except Exception as error:  # anything at all, from assertions to TVM's internal errors
        failed = re.search(r"Error converting operator (\w+)", printed.getvalue())
        what = f"the operator {failed[1]}" if failed else "this model"
        raise InputError(f"{label}: TVM's ONNX importer cannot convert {what}: {one_line(error)}") from error


def _ort_message(error: Exception) -> str:
    """ONNX Runtime's message without its code, temporary path and source line."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"Load model from \S+ failed:\s*", "", text)
    text = re.sub(rf"{re.escape(os.sep)}\S+\.(cc|h):\d+ [^:]*?\S+\([^)]*\)\s*", "", text)
    return text[:300]
