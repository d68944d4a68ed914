"""Networks of the corpus in lower precision than the float32 that they are written in.

What TVM 0.27 compiles for CPUs decides which programs these are:

- float16 and bfloat16 products accumulate in float32 and are then rounded, as the intake has them from
  PyTorch. Summed in bfloat16 they do not compile once vectorised: LLVM code generation takes the buffer for
  one of uint16 ("dtype mismatch on BufferStore"). Nor does a layer norm ("only support float32 and float16").
- int8 products are made in Relax. TVM's ONNX importer lacks ConvInteger, QLinearConv and QLinearMatMul, casts
  MatMulInteger's matrices to int32 before it multiplies, and has models of QuantizeLinear and
  DequantizeLinear compute in float32; its PyTorch importer lacks ``_int_mm``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import tvm

from pretune.intake.relax_prepare import constant_value

from .blocks import Built

_SCALE = 0.05
"""Scale of quantised activations. A fixed one serves: a kernel takes the same time whatever it is."""

# Axis of the weight that becomes the output's channels.
_CHANNELS = {"matmul": 1, "nn.conv1d": 0, "nn.conv2d": 0, "nn.conv3d": 0}


def half(built: Built, dtype: torch.dtype) -> Built:
    """A module and its inputs, floating-point ones cast to `dtype`."""
    module, inputs = built
    return module.to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def quantise(mod: tvm.IRModule) -> tvm.IRModule:
    """Compute every product with a constant weight in int8, accumulated in int32.

    Symmetric, one scale for the activations and one for each output channel of the weight, as quantised
    models of CPUs mostly are. Products of two activations, and all other operators, stay in float32.

    Parameters
    ----------
    mod : tvm.IRModule
        `pretune.intake.Program.mod` of a float32 network.
    """
    from tvm.relax.dpl import is_const, is_op, rewrite_call, wildcard

    func = mod["main"]
    for op in _CHANNELS:
        data, weight = wildcard(), is_const()
        product = is_op(f"relax.{op}")(data, weight)
        func = rewrite_call(product, partial(_narrow, op, data, weight), func)
    return tvm.IRModule({"main": func})


def _narrow(op: str, data: Any, weight: Any, product: Any, matches: Any) -> Any:
    """The product in int8; `data` and `weight` are the patterns of its operands."""
    from tvm import relax

    values = constant_value(matches[weight])
    if values.dtype != np.float32 or (op == "matmul" and values.ndim != 2):
        return product
    channels = _CHANNELS[op]
    others = tuple(axis for axis in range(values.ndim) if axis != channels)
    scale = np.maximum(np.abs(values).max(others, keepdims=True), 1e-6) / 127
    narrow = relax.const(np.rint(values / scale).astype("int8"))
    quantised = relax.op.quantize(
        matches[data], relax.const(_SCALE, "float32"), relax.const(0, "int8"), out_dtype="int8"
    )
    if op == "matmul":
        total = relax.op.matmul(quantised, narrow, out_dtype="int32")
        scale = scale.reshape(-1)
    else:
        attrs = product.attrs
        total = getattr(relax.op.nn, op.removeprefix("nn."))(
            quantised, narrow, list(attrs.strides), list(attrs.padding), list(attrs.dilation), attrs.groups,
            attrs.data_layout, attrs.kernel_layout, out_dtype="int32",
        )  # fmt: skip
        scale = scale.reshape(1, -1, *(1,) * (values.ndim - 2))
    return relax.op.multiply(
        relax.op.astype(total, "float32"), relax.const((scale * _SCALE).astype("float32"))
    )
