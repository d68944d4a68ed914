"""PyTorch programs: ``torch.export`` files and objects. torch is imported only when one is given."""

from __future__ import annotations

import logging
import warnings
import zipfile
from pathlib import Path
from typing import Any

import tvm

from pretune.errors import InputError, MissingExtraError, one_line
from pretune.intake.files import check_file
from pretune.intake.load import EXPORT
from pretune.intake.program import Program, Shapes, program_from_relax
from pretune.native_log import quiet_native

# Larger results of constant subgraphs (bytes) are left to be computed at run time.
_FOLD_AT_MOST = 64 << 20


def load_pt2(path: Path) -> Any:
    """Read a ``torch.export.ExportedProgram``.

    Raises
    ------
    InputError
        If the file is none.
    MissingExtraError
        If torch is not installed.
    """
    check_file(path)
    try:
        import torch
    except ImportError:
        raise MissingExtraError(f"reading {path}", "export") from None
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is not a torch.export program, or is truncated; write it with: {EXPORT}")
    logger = logging.getLogger("torch.export")  # prints the stack trace of whatever fails
    silent, logger.disabled = logger.disabled, True
    try:
        return torch.export.load(str(path))
    except Exception as error:  # zip, pickle, JSON and version errors
        raise InputError(
            f"{path} is not a torch.export program that this torch reads: {one_line(error)}; "
            f"write it with: {EXPORT}"
        ) from error
    finally:
        logger.disabled = silent


def program_from_exported(
    exported: Any,
    *,
    target: tvm.target.Target | None = None,
    name: str = "program",
    shapes: Shapes | None = None,
    source: Path | None = None,
) -> Program:
    """Import a ``torch.export.ExportedProgram``; its parameters become constants.

    Parameters
    ----------
    exported : torch.export.ExportedProgram
        The program, exported in evaluation mode.
    target : tvm.target.Target, optional
        What it will be compiled for; a plain CPU if absent.
    name : str
        Name of the program.
    shapes : mapping of str to sequence of int, optional
        Values for dynamic inputs.
    source : Path, optional
        The file it came from.

    Raises
    ------
    InputError
        If TVM's importer lacks an operator (named in the message), or the program cannot be tuned.
    """
    import torch
    from tvm.relax.frontend.torch import from_exported_program

    # PyTorch's own decompositions, but for those that turn a matrix product into copies around a batched one.
    table = torch.export.default_decompositions()
    for op in (torch.ops.aten.linear.default, torch.ops.aten.matmul.default):
        table.pop(op, None)
    try:
        with quiet_native(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions(table)
            updated = sorted(exported.graph_signature.buffers_to_mutate.values())
            if updated:
                raise InputError(
                    f"{name}: the program updates {', '.join(updated[:3])} as it runs, as in training; "
                    f"call model.eval() before: {EXPORT}"
                )
            _fold_constants(exported.graph_module)
            _round_products(exported.graph_module)
            _widen_norms(exported.graph_module)
            mod = from_exported_program(exported, keep_params_as_input=False, run_ep_decomposition=False)
    except InputError:
        raise
    except Exception as error:  # assertion, type and index errors of the importer and of torch
        raise InputError(f"{name}: TVM cannot import this PyTorch program: {one_line(error)}") from error
    return program_from_relax(
        mod, target=target or tvm.target.Target("llvm"), name=name, shapes=shapes, source=source
    )


def _fold_constants(module: Any) -> None:
    """Compute, in PyTorch, what depends neither on inputs nor on weights: positions, masks and the like.

    TVM folds no operator that makes a tensor from numbers (``arange``), and fails to compile some that follow
    it in the attention masks of language models (``cumsum`` of booleans).
    """
    import torch
    from torch.fx.node import Node, map_arg
    from tvm import relax

    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or not all(arg in values for arg in node.all_input_nodes):
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags or node.is_impure():
            continue
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor) or any(not isinstance(dim, int) for dim in fake.shape):
            continue
        if fake.numel() * fake.element_size() > _FOLD_AT_MOST:
            continue
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs).contiguous()
    for node, value in values.items():
        if not any(user not in values for user in node.users):
            continue
        name = f"pretune_constant_{node.name}"
        array: Any = tvm.runtime.from_dlpack(value.clone())
        # The importer takes an attribute as it is, so it may be a Relax constant already.
        setattr(module, name, relax.const(array))
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        constant.meta["val"] = node.meta["val"]
        for user in [user for user in node.users if user not in values]:
            user.replace_input_with(node, constant)
    module.graph.eliminate_dead_code()


# Products that the importer computes in float32, with the position of the bias among their arguments.
_PRODUCTS = {
    "aten.linear.default": 2,
    "aten.addmm.default": 0,
    "aten.matmul.default": None,
    "aten.mm.default": None,
    "aten.bmm.default": None,
    "aten.convolution.default": 2,
}


def _cast(module: Any, value: Any, dtype: Any) -> Any:
    import torch

    return module.graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})


def _round(module: Any, node: Any, dtype: Any) -> None:
    """Cast what a node gives, for all of its users."""
    with module.graph.inserting_after(node):
        rounded = _cast(module, node, dtype)
        rounded.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(rounded, delete_user_cb=lambda user: user is not rounded)


def _widen_norms(module: Any) -> None:
    """Compute layer norms of bfloat16 in float32, as PyTorch does inside: TVM has none of bfloat16."""
    import torch

    for node in list(module.graph.nodes):
        if str(node.target) != "aten.native_layer_norm.default":
            continue
        if node.meta["val"][0].dtype != torch.bfloat16:
            continue
        with module.graph.inserting_before(node):
            for argument in node.all_input_nodes:
                node.replace_input_with(argument, _cast(module, argument, torch.float32))
        for result in list(node.users):  # of the three the importer has only the first
            _round(module, result, torch.bfloat16)


def _round_products(module: Any) -> None:
    """Give products of half precision the dtype that they have in PyTorch, after the bias.

    TVM's importer leaves the product in float32, as PyTorch accumulates it, and then fails to add a bias of
    another dtype to it.
    """
    import torch

    for node in list(module.graph.nodes):
        value = node.meta.get("val")
        if str(node.target) not in _PRODUCTS or value.dtype not in (torch.float16, torch.bfloat16):
            continue
        bias = _PRODUCTS[str(node.target)]
        if bias is not None and len(node.args) > bias and node.args[bias] is not None:
            with module.graph.inserting_before(node):
                node.update_arg(bias, _cast(module, node.args[bias], torch.float32))
        _round(module, node, value.dtype)
