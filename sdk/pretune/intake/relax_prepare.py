"""From an imported Relax module to the one that is tuned: parameters bound, constants folded."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tvm

from pretune.native_log import quiet_native

_CONVS = ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")


def prepare_relax(mod: tvm.IRModule, params: dict[Any, Any] | None = None) -> tvm.IRModule:
    """Bind parameters and fold everything that does not depend on the program's inputs.

    Weights stay constants of the Relax module, outside the functions that are tuned: those take them as
    arguments. A linear layer's weight is transposed here, not by a task of its own; batch norms go into the
    convolution before them, or else are decomposed.

    Parameters
    ----------
    mod : tvm.IRModule
        Module with a Relax function ``main``, as an importer returned it.
    params : dict, optional
        Values of parameters by name, when they are still inputs.
    """
    from tvm import relax

    with quiet_native(), tvm.transform.PassContext(opt_level=3):
        if params:
            mod = relax.transform.BindParams("main", params)(mod)
        mod = relax.transform.FoldConstant()(mod)
        mod = mod.clone()
        mod["main"] = fold_batch_norm(mod["main"])
        steps = [
            # What is left of batch norm, dropout and the like.
            relax.transform.DecomposeOpsForInference("main"),
            relax.transform.CanonicalizeBindings(),
            relax.transform.FoldConstant(),
            relax.transform.DeadCodeElimination(["main"]),
        ]
        return tvm.transform.Sequential(steps)(mod)


def fold_batch_norm(func: Any) -> Any:
    """Fold inference batch norms into the convolution before, 1-D to 3-D, with or without bias.

    A convolution of half precision that accumulates in float32 is cast before its norm, which then goes in
    before the cast.

    TVM's own pass, ``FoldBatchnormToConv2D``, knows only 2-D convolutions without bias.
    """
    from tvm import relax
    from tvm.relax.dpl import TupleGetItemPattern, is_const, is_op, rewrite_call, wildcard

    data, weight, bias = wildcard(), is_const(), is_const()
    gamma, beta, mean, variance = is_const(), is_const(), is_const(), is_const()
    uses = _uses(func)

    for op in _CONVS:
        conv = is_op(op)(data, weight)
        for has_bias, is_cast in itertools.product((False, True), repeat=2):
            before = is_op("relax.add")(conv, bias) if has_bias else conv
            cast = is_op("relax.astype")(before) if is_cast else before
            norm = is_op("relax.nn.batch_norm")(cast, gamma, beta, mean, variance)

            def rewrite(
                expr: Any,
                matches: Any,
                conv: Any = conv,
                norm: Any = norm,
                before: Any = before,
                cast: Any = cast,
            ) -> Any:
                conv_call, norm_call, before_call = matches[conv], matches[norm], matches[before]
                weights = constant_value(matches[weight])
                layout = conv_call.attrs.kernel_layout
                # Someone else reads the convolution: folding would compute it twice.
                shared = any(uses.get(call, 0) > 1 for call in (conv_call, before_call, matches[cast]))
                is_cast = cast is not before
                if is_cast and conv_call.attrs.out_dtype != "float32":
                    return expr
                if layout[:2] != "OI" or norm_call.attrs.axis != 1 or norm_call.attrs.training or shared:
                    return expr
                ones = (1,) * (weights.ndim - 2)
                stats = (gamma, beta, mean, variance)
                values = {key: constant_value(matches[key]).astype("float64") for key in stats}
                scale = 1.0 / np.sqrt(values[variance] + norm_call.attrs.epsilon)
                if norm_call.attrs.scale:
                    scale = scale * values[gamma]
                shift = -values[mean]
                if bias in matches:
                    offset = constant_value(matches[bias]).astype("float64")
                    if offset.size not in (1, scale.size):
                        return expr
                    shift = shift + offset.reshape(-1)
                shift = shift * scale
                if norm_call.attrs.center:
                    shift = shift + values[beta]
                folded = (weights * scale.reshape(-1, 1, *ones)).astype(weights.dtype)
                call = relax.Call(conv_call.op, [conv_call.args[0], relax.const(folded)], conv_call.attrs)
                # Of the dtype that it accumulates in, unless that is the weights'.
                dtype = "float32" if conv_call.attrs.out_dtype == "float32" else weights.dtype
                result = relax.op.add(call, relax.const(shift.reshape(1, -1, *ones).astype(dtype)))
                return relax.op.astype(result, matches[cast].attrs.dtype) if is_cast else result

            func = rewrite_call(TupleGetItemPattern(norm, 0), rewrite, func)
    return func


def constant_value(expr: Any) -> np.ndarray:
    """Contents of a Relax constant; the attribute is called ``value`` from TVM 0.27 on."""
    return (expr.value if hasattr(expr, "value") else expr.data).numpy()


def _uses(func: Any) -> dict[Any, int]:
    """How often the result of each call bound in a Relax function is read."""
    from tvm import relax

    bound: dict[Any, Any] = {}
    counts: dict[Any, int] = {}
    for block in func.body.blocks:
        for binding in block.bindings:
            bound[binding.var] = binding.value
            if isinstance(binding.value, relax.Call | relax.Tuple):
                fields = binding.value.args if isinstance(binding.value, relax.Call) else binding.value.fields
                for arg in fields:
                    counts[arg] = counts.get(arg, 0) + 1
            elif isinstance(binding.value, relax.TupleGetItem):
                value = binding.value.tuple_value
                counts[value] = counts.get(value, 0) + 1
    return {value: counts.get(var, 0) for var, value in bound.items()}
