"""Read a TensorIR program into plain Python: its blocks, loops, axes and linear buffer accesses.

Both encodings start here: the state encoder reads every program it sees, the action encoder reads the
initial program once and follows the instructions of a trace symbolically from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Linear = dict[int, float]
"""A linear form: coefficient by variable (loop or axis); the constant term is dropped."""


def key_of(var: Any) -> int:
    """What stands for a TVM variable in linear forms: its hash, which is its address.

    The variable itself would be a slow key: comparing two of them builds an expression.
    """
    return hash(var)


SERIAL, PARALLEL, VECTORIZED, UNROLLED, THREAD = range(5)
"""Loop kinds, numbered as ``tvm.tirx.ForKind``."""

COMMUTATIVE_REDUCE = 2
"""TVM's number for the axes of a block that are reduced over."""


@dataclass
class Buffer:
    """A buffer: `shape` in elements, `itemsize` in bytes."""

    name: str
    shape: tuple[int, ...]
    itemsize: float
    scope: str
    is_float: bool

    @cached_property
    def strides(self) -> list[int]:
        """Row-major strides in elements, one per dimension."""
        strides = [1] * len(self.shape)
        for d in range(len(self.shape) - 2, -1, -1):
            strides[d] = strides[d + 1] * self.shape[d + 1]
        return strides

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Access:
    """One access of a block: per dimension of `buffer`, the index as a linear form."""

    buffer: Buffer
    is_write: bool
    index: list[Linear]

    def stride(self, var: int) -> float:
        """Elements by which the address moves when `var` grows by one."""
        moves = [(form[var], d) for d, form in enumerate(self.index) if var in form]
        if len(moves) > 1 and any(abs(slope) >= 1 for slope, _d in moves):
            # [x // 28, x % 28] moves by one element: what the remainder falls back by, the division makes up.
            moves = [(slope, d) for slope, d in moves if abs(slope) >= 1]
        return sum((self.buffer.strides[d] * slope for slope, d in moves), 0.0)


@dataclass
class Loop:
    """One loop around a block. `unroll` is the automatic unroll limit in force there."""

    var: int
    extent: int
    kind: int
    unroll: int


@dataclass
class Axis:
    """One iterator of a block, with its extent and whether it is a reduction."""

    var: int
    extent: int
    is_reduce: bool
    binding: Linear


OPS = ("add", "mul", "div", "max", "select", "special", "cast", "int")
_SPECIAL = ("exp", "tanh", "erf", "sqrt", "log", "sin", "cos", "pow", "sigmoid", "atan", "rsqrt", "hypot")


@dataclass
class Block:
    """A leaf block: what it computes per point, where it reads and writes, and the loops around it."""

    name: str
    axes: list[Axis]
    loops: list[Loop]
    accesses: list[Access]
    ops: list[float]
    has_init: bool
    is_reduce: bool
    guarded: bool = False

    @property
    def points(self) -> float:
        """Number of times the body runs, by its axes."""
        return math.prod(float(axis.extent) for axis in self.axes)

    @property
    def cost(self) -> float:
        """Weighted operations per point: a transcendental counts 12, a division 4."""
        add, mul, div, mx, select, special, cast, integer = self.ops
        return 1.0 + add + mul + 4 * div + mx + select + 12 * special + cast + 0.5 * integer


_LOADS = ("BufferLoad", "TensorLoad")  # the second name since TVM 0.27


def _const(expr: Any) -> int | None:
    value = getattr(expr, "value", None)
    return value if isinstance(value, int) else None


def linear_form(expr: Any, env: dict[int, Linear]) -> Linear:
    """The linear part of an index expression, with variables replaced through `env`.

    Division and remainder by a constant are taken as if exact (``x // 4`` has slope 1/4; ``x % 4``
    keeps slopes that are not multiples of 4); any other operation keeps the larger slope of its
    operands, so that a dependence is never lost.
    """
    kind = type(expr).__name__
    if kind == "Var":
        key = key_of(expr)
        found = env.get(key)
        return {key: 1.0} if found is None else found
    if kind in ("IntImm", "FloatImm"):
        return {}
    if kind in ("Add", "Sub"):
        a, b = linear_form(expr.a, env), linear_form(expr.b, env)
        sign = 1.0 if kind == "Add" else -1.0
        out = dict(a)
        for var, c in b.items():
            out[var] = out.get(var, 0.0) + sign * c
        return out
    if kind == "Mul":
        for x, y in ((expr.a, expr.b), (expr.b, expr.a)):
            c = _const(y)
            if c is not None:
                return {var: k * c for var, k in linear_form(x, env).items()}
    if kind in ("FloorDiv", "Div", "TruncDiv"):
        c = _const(expr.b)
        if c:
            return {var: k / c for var, k in linear_form(expr.a, env).items()}
    if kind in ("FloorMod", "Mod", "TruncMod"):
        c = _const(expr.b)
        if c:
            return {var: k for var, k in linear_form(expr.a, env).items() if k % c != 0}
    if kind == "Cast":
        return linear_form(expr.value, env)
    if kind == "Ramp":
        return linear_form(expr.base, env)
    out: Linear = {}
    for child in _children(expr):
        for var, k in linear_form(child, env).items():
            if abs(k) > abs(out.get(var, 0.0)):
                out[var] = k
    return out


def _children(expr: Any) -> list[Any]:
    kind = type(expr).__name__
    if kind in _LOADS:
        return list(expr.indices)
    if kind == "Call":
        return list(expr.args)
    if kind == "Select":
        return [expr.condition, expr.true_value, expr.false_value]
    if kind in ("Not", "Cast"):
        return [getattr(expr, "a", None) or expr.value]
    if kind == "Let":
        return [expr.value, expr.body]
    if kind == "Broadcast":
        return [expr.value]
    if hasattr(expr, "a") and hasattr(expr, "b"):
        return [expr.a, expr.b]
    return []


_OP_OF = {
    "Add": "add", "Sub": "add", "Mul": "mul", "Div": "div", "Max": "max", "Min": "max", "Select": "select",
    "EQ": "select", "NE": "select", "LT": "select", "LE": "select", "GT": "select", "GE": "select",
    "And": "select", "Or": "select", "Not": "select", "Cast": "cast", "FloorDiv": "int", "FloorMod": "int",
}  # fmt: skip


def _itemsize(dtype: str) -> float:
    bits = "".join(c for c in dtype.split("x")[0] if c.isdigit())
    # float8_e4m3 and the like carry more digits than the width.
    if dtype.startswith("float8"):
        bits = "8"
    return max(int(bits or 8), 1) / 8


class _Reader:
    """Walks one PrimFunc; `blocks` collects the leaf blocks in program order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.loops: list[Loop] = []
        self.env: dict[int, Linear] = {}
        self.buffers: dict[Any, Buffer] = {}
        self.unroll = 0
        self.guards = 0
        self.current: Block | None = None
        self._visit: dict[str, Callable[[Any], None]] = {
            "SeqStmt": self._seq, "For": self._for, "SBlockRealize": self._realize,
            "BufferStore": self._store, "IfThenElse": self._if, "AttrStmt": self._attr, "LetStmt": self._body,
            "DeclBuffer": self._maybe_body, "AllocBuffer": self._maybe_body, "Allocate": self._body,
            "While": self._while, "Evaluate": self._evaluate,
        }  # fmt: skip

    def visit(self, stmt: Any) -> None:
        handler = self._visit.get(type(stmt).__name__)
        if handler is not None:
            handler(stmt)

    def _seq(self, stmt: Any) -> None:
        for s in stmt.seq:
            self.visit(s)

    def _body(self, stmt: Any) -> None:
        self.visit(stmt.body)

    def _maybe_body(self, stmt: Any) -> None:
        body = getattr(stmt, "body", None)
        if body is not None:
            self.visit(body)

    def _while(self, stmt: Any) -> None:
        self.guards += 1
        self.visit(stmt.body)
        self.guards -= 1

    def _if(self, stmt: Any) -> None:
        self.guards += 1
        self.visit(stmt.then_case)
        if stmt.else_case is not None:
            self.visit(stmt.else_case)
        self.guards -= 1

    def _attr(self, stmt: Any) -> None:
        saved = self.unroll
        if stmt.attr_key == "pragma_auto_unroll_max_step":
            self.unroll = _const(stmt.value) or 0
        self.visit(stmt.body)
        self.unroll = saved

    def _for(self, stmt: Any) -> None:
        saved = self.unroll
        step = stmt.annotations.get("pragma_auto_unroll_max_step") if stmt.annotations else None
        if step is not None:
            self.unroll = step if isinstance(step, int) else _const(step) or 0
        extent = _const(stmt.extent)
        self.loops.append(
            Loop(key_of(stmt.loop_var), 1 if extent is None else extent, int(stmt.kind), self.unroll)
        )
        self.visit(stmt.body)
        self.loops.pop()
        self.unroll = saved

    def _realize(self, stmt: Any) -> None:
        block = stmt.block
        if block.name_hint == "root" and not block.iter_vars:
            self.visit(block.body)
            return
        axes = []
        for iter_var, value in zip(block.iter_vars, stmt.iter_values, strict=True):
            form = linear_form(value, self.env)
            key = key_of(iter_var.var)
            self.env[key] = form
            is_reduce = int(iter_var.iter_type) == COMMUTATIVE_REDUCE
            axes.append(Axis(key, _const(iter_var.dom.extent) or 1, is_reduce, form))
        guarded = type(stmt.predicate).__name__ not in ("IntImm", "Bool") or self.guards > 0
        outer = self.current
        self.current = Block(
            block.name_hint, axes, [], [], [0.0] * len(OPS), block.init is not None,
            any(a.is_reduce for a in axes), guarded,
        )  # fmt: skip
        if block.annotations and "pragma_auto_unroll_max_step" in block.annotations:
            self.unroll = _const(block.annotations["pragma_auto_unroll_max_step"]) or self.unroll
        self.visit(block.body)
        if self.current.accesses:
            if not self.current.loops:
                self.current.loops = list(self.loops)
            self.blocks.append(self.current)
        self.current = outer

    def _store(self, stmt: Any) -> None:
        block = self.current
        if block is None:
            return
        block.loops = list(self.loops)
        self._access(block, stmt.buffer, stmt.indices, True)
        self._expr(block, stmt.value)

    def _evaluate(self, stmt: Any) -> None:
        if self.current is not None:
            self.current.loops = list(self.loops)
            self._expr(self.current, stmt.value)

    def _buffer(self, buffer: Any) -> Buffer:
        found = self.buffers.get(buffer)
        if found is None:
            dtype = str(buffer.dtype)
            shape = tuple(_const(s) or 1 for s in buffer.shape)
            found = Buffer(buffer.name, shape, _itemsize(dtype), buffer.scope(), "float" in dtype)
            self.buffers[buffer] = found
        return found

    def _access(self, block: Block, buffer: Any, indices: Any, is_write: bool) -> None:
        info = self._buffer(buffer)
        index = [linear_form(i, self.env) for i in indices]
        for other in block.accesses:
            if other.buffer is info and (other.is_write or not is_write) and other.index == index:
                return
        block.accesses.append(Access(info, is_write, index))

    def _expr(self, block: Block, expr: Any) -> None:
        kind = type(expr).__name__
        if kind in _LOADS:
            source = expr.source if kind == "TensorLoad" else expr.buffer
            self._access(block, source, expr.indices, False)
            return
        if kind == "Call":
            name = str(getattr(expr.op, "name", ""))
            short = name.rsplit(".", 1)[-1]
            if short in ("if_then_else",):
                block.ops[OPS.index("select")] += 1
            elif any(short.startswith(s) for s in _SPECIAL):
                block.ops[OPS.index("special")] += 1
            elif short in ("fma",):
                block.ops[OPS.index("mul")] += 1
        else:
            op = _OP_OF.get(kind)
            if op is not None:
                block.ops[OPS.index(op)] += 1
        for child in _children(expr):
            self._expr(block, child)


def read_program(func: Any) -> list[Block]:
    """The leaf blocks of a PrimFunc in program order.

    Accesses and axis bindings are linear in the loop variables of the block's own nest.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A TensorIR function, at any stage of scheduling.
    """
    reader = _Reader()
    reader.visit(func.body)
    return reader.blocks
