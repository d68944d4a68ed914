"""What stands between pretune and TVM: intrinsics by target, messages made of exceptions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretune.errors import one_line

SDK = str(Path(__file__).parents[1] / "sdk")

CONTEXTS = """
import sys
sys.modules["torch"] = None
import pretune.metaschedule  # sets up for this machine
from tvm import te
from tvm.s_tir import TensorIntrin
from tvm.s_tir import meta_schedule as ms

a = te.placeholder((64, 64), name="A")
func = te.create_prim_func([a, te.compute((64, 64), lambda i, j: a[i, j] + 1.0, name="B")])

def known(name):
    return TensorIntrin.get(name, allow_missing=True) is not None

assert not known("dot_4x4_i8i8s32_neon")
target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+v8.2a", "+dotprod"], "num-cores": 4}
context = ms.TuneContext(func, target=target, space_generator="post-order-apply")
assert known("dot_4x4_i8i8s32_neon") and len(context.generate_design_space()) > 0
import tvm.s_tir.tensor_intrin
assert not [name for name in sys.modules if name.startswith("tvm.s_tir.tensor_intrin.riscv")]
assert tvm.s_tir.tensor_intrin.riscv_cpu.__name__.endswith("riscv_cpu")
assert not hasattr(tvm.s_tir.tensor_intrin, "abacus")
"""


def test_each_context_finds_the_intrinsics_of_its_target():
    environment = os.environ | {"PYTHONPATH": SDK}
    done = subprocess.run([sys.executable, "-c", CONTEXTS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", "RuntimeError"),
        ("plain", "plain"),
        ("first\nsecond", "first"),
        ("Compilation error:\n/usr/bin/ld: no\nCommand line: g++", "Compilation error: /usr/bin/ld: no"),
        ('Traceback (most recent call last):\n  File "a.cc", line 1\nInternalError: b\n', "InternalError: b"),
        ("[12:00:01] /src/tir/x.cc:12: Check failed: y", "Check failed: y"),
        ("x" * 400, "x" * 300),
    ],
)
def test_an_exception_as_one_line(message, line):
    assert one_line(RuntimeError(message)) == line
