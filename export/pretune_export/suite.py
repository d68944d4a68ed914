"""Suites of PyTorch subgraphs: Python files that define ``SUBGRAPHS``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.errors import InputError, MissingExtraError
from pretune.intake.files import check_file

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.intake import Program, Task


def load_suite(path: str | Path) -> dict[str, Any]:
    """``SUBGRAPHS`` of a suite file: objects by name, whose ``build()`` gives a module and its inputs.

    Raises
    ------
    MissingExtraError
        If torch is not installed.
    InputError
        If the file cannot be run, or defines none.
    """
    path = Path(path).expanduser()
    check_file(path)
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtraError("a suite of PyTorch subgraphs", "bench") from None
    # Files of the same name in different folders are different modules.
    name = f"pretune_suite_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file; a suite defines SUBGRAPHS, as paper22.py does")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does
        raise InputError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, "SUBGRAPHS", None)
    if not isinstance(found, dict) or not found or not all(hasattr(item, "build") for item in found.values()):
        raise InputError(f"{path} defines no SUBGRAPHS: a dict of objects with build(), as in paper22.py")
    return found


def tasks_of_module(module: Any, inputs: Any, *, target: Target, name: str) -> tuple[Task, ...]:
    """Tasks of a PyTorch module: those of `program_of_module`."""
    return program_of_module(module, inputs, target=target, name=name).tasks


def program_of_module(module: Any, inputs: Any, *, target: Target, name: str) -> Program:
    """Program of a PyTorch module, through ``torch.export`` and the intake.

    Benchmarks and the training side's corpus both come this way, so that a task has one identity in both.

    Parameters
    ----------
    module : torch.nn.Module
    inputs : iterable of torch.Tensor
        Example inputs.
    target : tvm.target.Target
        What it would be compiled for.
    name : str

    Raises
    ------
    InputError
        If TVM cannot import it.
    """
    import torch

    from pretune_export.torch_programs import program_from_exported

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module.eval(), tuple(inputs), strict=False)
        return program_from_exported(exported, target=target, name=name)
