"""What stands between pretune and the versions of TVM it supports."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import inspect
import platform
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.errors import EnvironmentFaultError

if TYPE_CHECKING:
    from tvm.target import Target

TVM_RANGE = ((0, 26), (0, 28))
"""Lowest TVM version that is tested, and the first that is not."""

FFI_BELOW = (0, 1, 15)
"""First apache-tvm-ffi version whose ``ToJSONGraph`` segfaults inside ``TuneContext.__init__``."""

# Tensor intrinsics that MetaSchedule's default design spaces of a target kind refer to. Importing the
# whole package instead costs 22 to 38 s in every process.
_INTRINSICS = {
    "c": ("x86",),
    "cuda": ("cuda",),
    "rocm": ("rocm",),
    "metal": ("metal",),
    "hexagon": ("hexagon",),
}
# On llvm, by how the architecture begins.
_LLVM = {
    "x86": ("x86",),
    "amd64": ("x86",),
    "i686": ("x86",),
    "aarch64": ("arm_cpu",),
    "arm": ("arm_cpu",),
    "riscv": ("riscv_cpu",),
}
_PACKAGE = "tvm.s_tir.tensor_intrin"
_LOCK = threading.RLock()  # a family imports another


def _release(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_versions() -> None:
    """Check TVM and its ffi before either is imported, since the wrong pair kills the process.

    Raises
    ------
    EnvironmentFaultError
        If TVM is not installed, outside `TVM_RANGE`, or paired with an ffi that segfaults.
    """
    fix = "run: pip install 'apache-tvm>=0.26,<0.28' 'apache-tvm-ffi>=0.1.14,<0.1.15'"
    try:
        tvm, ffi = (importlib.metadata.version(name) for name in ("apache-tvm", "apache-tvm-ffi"))
    except importlib.metadata.PackageNotFoundError as error:
        raise EnvironmentFaultError(f"{error.name} is not installed; {fix}") from None
    low, high = TVM_RANGE
    if not low <= _release(tvm)[:2] < high:
        raise EnvironmentFaultError(f"apache-tvm {tvm} is outside the tested range 0.26 to 0.27; {fix}")
    if _release(ffi) >= FFI_BELOW:
        raise EnvironmentFaultError(f"apache-tvm-ffi {ffi} crashes with apache-tvm {tvm}; {fix}")


def setup_tvm(target: Target | str = "llvm") -> None:
    """Make MetaSchedule usable at once: register the tensor intrinsics of one target only.

    ``TuneContext.__init__`` imports ``tvm.s_tir.tensor_intrin``, which registers those of every target
    (22 to 38 s). A package object with the same path takes its place, so that each family of intrinsics is
    imported (0.2 s for x86) when its name is used, or when a context for its target is made: stock
    MetaSchedule works in the same process for any target, and so does calling this again for another one.
    Only code that schedules without a context, and counts on ``import tvm.s_tir.tensor_intrin`` to register
    everything, has to import its family by name (``import tvm.s_tir.tensor_intrin.cuda``), unless it imported
    the package before pretune.

    Parameters
    ----------
    target : tvm.target.Target or str
        The target, or only its kind, such as ``"llvm"`` or ``"cuda"``.
    """
    check_versions()
    import tvm.s_tir

    if _PACKAGE not in sys.modules:
        path = Path(tvm.s_tir.__file__).parent / "tensor_intrin"
        package = types.ModuleType(_PACKAGE)
        package.__path__ = [str(path)]
        package.__spec__ = importlib.machinery.ModuleSpec(_PACKAGE, None, is_package=True)

        def family(name: str) -> Any:
            if not (path / f"{name}.py").is_file():
                raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
            return _import_family(name)

        package.__dict__["__getattr__"] = family
        sys.modules[_PACKAGE] = package
        parent: Any = tvm.s_tir
        parent.tensor_intrin = package
        _set_up_with_each_context()
    for name in _families(target):
        _import_family(name)


def _import_family(name: str) -> Any:
    module = f"{_PACKAGE}.{name}"
    if module not in sys.modules:
        with _LOCK, _quick_stacks():
            importlib.import_module(module)
    return sys.modules[module]


@contextlib.contextmanager
def _quick_stacks() -> Iterator[None]:
    """Have `inspect.stack` read the source of three frames only.

    TVMScript calls it for each function that it parses, 360 times for CUDA, and reads the third frame's line.
    For the frames of an import, which have no file, Python searches all modules: tens of seconds in all.
    """
    original = inspect.stack

    def stack(context: int = 1) -> list[inspect.FrameInfo]:
        frames: list[inspect.FrameInfo] = []
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            found = (code.co_filename, frame.f_lineno, code.co_name, None, None)
            if len(frames) < 3:
                found = inspect.getframeinfo(frame, context)
            frames.append(inspect.FrameInfo(frame, *found))
            frame = frame.f_back
        return frames

    inspect.stack = stack
    try:
        yield
    finally:
        inspect.stack = original


def _set_up_with_each_context() -> None:
    """Have every new ``TuneContext`` register the intrinsics of its target, before its rules look them up."""
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.target import Target

    original = TuneContext.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, target: Any = None, **options: Any) -> None:
        if target is not None and not isinstance(target, Target):
            target = Target(target)
        if target is not None:
            setup_tvm(target)
        original(self, *args, target=target, **options)

    stock: Any = TuneContext
    stock.__init__ = init


def _families(target: Target | str) -> tuple[str, ...]:
    if isinstance(target, str):
        kind, triple = target, ""
    else:
        described: Any = target  # TVM annotates its parts as strings
        kind, triple = described.kind.name, str(described.attrs.get("mtriple", ""))
    if kind == "llvm":
        arch = (triple.partition("-")[0] or platform.machine()).lower()
        return next((families for name, families in _LLVM.items() if arch.startswith(name)), ())
    return _INTRINSICS.get(kind, ())
