"""Elementary functions written out as arithmetic that LLVM turns into vector code.

TVM compiles ``exp``, ``erf`` and ``tanh`` for a CPU into calls of libm, one element at a time, and never
vectorises a loop with ``erf`` at all: a softmax or GELU then takes several times as long as it need, whatever
its schedule. `vectorise` replaces these calls in a scheduled program. A schedule's trace, its features and
its tuning record stay what they are, and nothing in TVM is changed: who compiles a program without this pass
gets libm.

Largest errors in units of the last place: exp 1, sigmoid 3, tanh and erf 7 (below 4e-7); tests assert them.
Denormal results of exp are 0; infinities, NaN and signed zeros come out as C defines them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from pretune import env


def vectorise(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Replace calls of elementary functions on float32 scalars by arithmetic.

    Parameters
    ----------
    mod : tvm.IRModule
        Scheduled PrimFuncs, not yet lowered; functions of other kinds stay as they are.
    target : tvm.target.Target
        What it will be compiled for. Other targets than llvm have such functions of their own, and with
        ``fast-math`` LLVM would undo the rounding that the arithmetic relies on: neither changes anything.

    Returns
    -------
    tvm.IRModule
        Equal to `mod` if nothing changes, as with ``PRETUNE_EXACT_MATH=1``.
    """
    kind: Any = target.kind  # TVM annotates it as a string
    if env.exact_math() or kind.name != "llvm" or any("fast-math" in str(name) for name in target.attrs):
        return mod
    rewrite: Any = tirx.transform.prim_func_pass(_rewrite, opt_level=0)
    return rewrite(mod)


def _rewrite(func: Any, _mod: tvm.IRModule, _context: Any) -> Any:
    return func.with_body(tvm_ffi.structural_map(func.body, (tvm.ir.Call, _replace)))


def _replace(call: Any) -> Any:
    rule = _RULES.get(getattr(call.op, "name", ""))
    if rule is None or str(call.ty.dtype) != "float32":
        return call
    return rule(*call.args)


def _let(value: Any, body: Callable[[Any], Any]) -> Any:
    """`body` of a variable that holds `value`: written out in place it would be computed for each use.

    It also keeps loads out of `Select`, which TVM turns into branches around any that it contains.
    """
    variable = tirx.Var("x", "float32")
    return tirx.Let(variable, value, body(variable))


def _float(value: float) -> Any:
    return tirx.const(value, "float32")


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    """The polynomial in `x` with these coefficients, highest degree first."""
    total = _float(coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + _float(coefficient)
    return total


# exp(x) = 2^n exp(r), n = round(x / ln 2), r = x - n ln 2 in two steps (Cody and Waite). The polynomial is
# that of Cephes' expf: exp(r) = 1 + r + r^2 P(r) for |r| <= ln(2) / 2.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
"""The first has few enough bits that its product with n is exact."""
_ROUND = 1.5 * 2.0**23
"""Added to a float32 of magnitude below 2^22, it leaves the nearest integer in the lowest bits."""
_EXP_LEAST, _EXP_MOST = -87.33654, 88.72283
"""Where results begin to be denormal, and the last argument with a finite result."""


def _exp(x: Any) -> Any:
    def of(x: Any) -> Any:
        return _let(x * _float(math.log2(math.e)) + _float(_ROUND), lambda shifted: scaled(x, shifted))

    def scaled(x: Any, shifted: Any) -> Any:
        n = shifted - _float(_ROUND)
        return _let(
            x - n * _float(_LN2_HIGH) - n * _float(_LN2_LOW),
            lambda r: chosen(x, r * r * _horner(r, _EXP) + r + _float(1.0), shifted),
        )

    def chosen(x: Any, mantissa: Any, shifted: Any) -> Any:
        # n is added to the exponent. Unsigned, for it may wrap around where the result is not used.
        bits = tirx.reinterpret("uint32", mantissa) + (
            tirx.reinterpret("uint32", shifted) << tirx.const(23, "uint32")
        )
        normal = tirx.Select(x >= _float(_EXP_LEAST), tirx.reinterpret("float32", bits), _float(0.0))
        return tirx.Select(x <= _float(_EXP_MOST), normal, x + _float(math.inf))  # NaN compares false

    return _let(x, of)


def _sigmoid(x: Any) -> Any:
    return _float(1.0) / (_float(1.0) + _exp(-x))


# Rational minimax approximations of Eigen 5 (MathFunctionsImpl.h and SpecialFunctionsImpl.h), in powers of
# x^2, highest first. From the last constant of each on, before rounding lets any exceed 1, the result is 1.
_TANH_P = (1.394553628e-8, 2.102733560e-5, 3.520756727e-3, 1.340216100e-1)
_TANH_Q = (8.015776984e-7, 3.326951409e-4, 2.597254514e-2, 4.673548340e-1, 1.0)
_TANH_ONE = 8.0

_ERF_P = (
    2.123732201653183e-6, 2.861979592125863e-4, 3.658048342913389e-3,
    5.243302136659622e-2, 1.874160766601562e-1, 1.128379106521606,
)  # fmt: skip
_ERF_Q = (
    3.891857340931892e-5, 1.143296016380191e-3, 1.475208811461926e-2,
    1.129456758499146e-1, 4.994257986545563e-1, 1.0,
)  # fmt: skip
_ERF_ONE = 3.598


def _tanh(x: Any) -> Any:
    def of(x: Any) -> Any:
        def ratio(x2: Any) -> Any:
            return (x * x2 * _horner(x2, _TANH_P) + x) / _horner(x2, _TANH_Q)

        return _saturated(x, _let(x * x, ratio), _TANH_ONE)

    return _let(x, of)


def _erf(x: Any) -> Any:
    def of(x: Any) -> Any:
        ratio = _let(x * x, lambda x2: x * _horner(x2, _ERF_P) / _horner(x2, _ERF_Q))
        return _saturated(x, ratio, _ERF_ONE)

    return _let(x, of)


def _saturated(x: Any, value: Any, one: float) -> Any:
    """`value`, but 1 and -1 where `x` is beyond `one` in magnitude."""
    above = tirx.Select(x >= _float(one), _float(1.0), value)
    return tirx.Select(x <= _float(-one), _float(-1.0), above)  # NaN compares false: `value` is NaN too


def _power(x: Any, exponent: Any) -> Any:
    """The cube in GPT-2's GELU, say; LLVM does the same for squares alone."""
    if getattr(exponent, "value", None) != 3.0:
        return tirx.pow(x, exponent)
    return _let(x, lambda x: x * x * x)


_RULES: dict[str, Callable[..., Any]] = {
    "tirx.exp": _exp,
    "tirx.sigmoid": _sigmoid,
    "tirx.tanh": _tanh,
    "tirx.erf": _erf,
    "tirx.pow": _power,
}
