"""One way in for everything that can be tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm

from pretune.errors import InputError
from pretune.intake.files import check_file
from pretune.intake.program import Program, Shapes
from pretune.intake.tvm_files import load_json, load_script, program_from_ir

EXPORT = "torch.export.save(torch.export.export(model.eval(), (example,)), 'model.pt2')"
"""What a user runs to get a PyTorch program that can be read."""

FORMATS = {
    ".onnx": "ONNX model",
    ".pt2": "torch.export program",
    ".py": "TVMScript",
    ".json": "TVM JSON",
}
"""File name extensions that are understood."""


def load_program(source: Any, *, target: tvm.target.Target, shapes: Shapes | None = None) -> Program:
    """Read a program to tune.

    Parameters
    ----------
    source : str, Path or object
        A file (`FORMATS`), or an object: PrimFunc, Relax function, IRModule, onnx.ModelProto,
        torch.export.ExportedProgram.
    target : tvm.target.Target
        What it will be compiled for.
    shapes : mapping of str to sequence of int, optional
        Shapes of the inputs with dynamic dimensions.

    Raises
    ------
    InputError
        If the program cannot be read, imported or tuned.
    MissingExtraError
        If a ``.pt2`` file is given and torch is not installed.
    """
    if isinstance(source, str | Path):
        return _load_file(Path(source).expanduser(), target, shapes)
    from tvm import relax, tirx

    if isinstance(source, tirx.PrimFunc | relax.Function | tvm.IRModule):
        return program_from_ir(source, target=target, shapes=shapes)
    # By name, so that neither onnx nor torch is imported for the sake of a comparison.
    classes = {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in type(source).__mro__}
    if "onnx.ModelProto" in classes:
        from pretune.intake.onnx_files import program_from_onnx

        return program_from_onnx(source, target=target, shapes=shapes)
    if "torch.ExportedProgram" in classes:
        from pretune_export.torch_programs import program_from_exported

        return program_from_exported(source, target=target, shapes=shapes)
    if "torch.Module" in classes:
        raise InputError(f"a torch.nn.Module has no fixed program; export it first: {EXPORT}")
    raise InputError(
        f"cannot tune a {type(source).__name__}; give a file ({', '.join(FORMATS)}), a PrimFunc, a Relax "
        "function, an IRModule, an onnx.ModelProto or a torch.export.ExportedProgram"
    )


def _load_file(path: Path, target: tvm.target.Target, shapes: Shapes | None) -> Program:
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        check_file(path)
        known = ", ".join(f"{key} ({what})" for key, what in FORMATS.items())
        advice = (
            f"; export it first: {EXPORT}"
            if suffix in (".pt", ".pth", ".ckpt", ".safetensors", ".bin")
            else ""
        )
        raise InputError(f"{path}: unknown kind of file; expected {known}{advice}")
    if suffix == ".onnx":
        from pretune.intake.onnx_files import program_from_onnx

        return program_from_onnx(path, target=target, shapes=shapes)
    if suffix == ".pt2":
        from pretune_export.torch_programs import load_pt2, program_from_exported

        exported = load_pt2(path)
        return program_from_exported(exported, target=target, name=path.stem, shapes=shapes, source=path)
    obj = load_script(path) if suffix == ".py" else load_json(path)
    return program_from_ir(obj, target=target, name=path.stem, shapes=shapes, source=path)
