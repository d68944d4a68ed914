"""Small programs that tests tune."""

from __future__ import annotations

import tvm

from pretune.compat import setup_tvm

setup_tvm()

from tvm import te  # noqa: E402

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})


def _module(*tensors) -> tvm.IRModule:
    from tvm.s_tir import meta_schedule as ms

    return ms.tune_context._normalize_mod(te.create_prim_func(list(tensors)))


def matmul(m: int = 64, n: int = 96, k: int = 128) -> tvm.IRModule:
    a, b = te.placeholder((m, k), "float32", "A"), te.placeholder((k, n), "float32", "B")
    r = te.reduce_axis((0, k), "k")
    return _module(a, b, te.compute((m, n), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), "C"))


def conv2d_relu(c: int = 8, f: int = 16, size: int = 14, stride: int = 1) -> tvm.IRModule:
    from tvm import topi

    x, w = te.placeholder((1, c, size, size), "float32", "X"), te.placeholder((f, c, 3, 3), "float32", "W")
    return _module(x, w, topi.nn.relu(topi.nn.conv2d_nchw(x, w, stride, 1, 1)))


def softmax(rows: int = 32, columns: int = 64) -> tvm.IRModule:
    from tvm import topi

    x = te.placeholder((rows, columns), "float32", "X")
    return _module(x, topi.nn.softmax(x))


def mean(rows: int = 128, columns: int = 768) -> tvm.IRModule:
    x, k = te.placeholder((rows, columns), "float32", "X"), te.reduce_axis((0, columns), "k")
    total = te.compute((rows, 1), lambda i, j: te.sum(x[i, k], axis=k), "total")
    return _module(x, te.compute((rows, 1), lambda i, j: total[i, j] / float(columns), "mean"))


def transpose(rows: int = 32, columns: int = 64) -> tvm.IRModule:
    from tvm import topi

    x = te.placeholder((rows, columns), "float32", "X")
    return _module(x, topi.transpose(x))
