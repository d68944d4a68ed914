"""What stands between pretune and the versions of TVM it supports."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

from pretune.errors import EnvironmentFaultError

TVM_RANGE = ((0, 26), (0, 28))
"""Lowest TVM version that is tested, and the first that is not."""

FFI_BELOW = (0, 1, 15)
"""First apache-tvm-ffi version whose ``ToJSONGraph`` segfaults inside ``TuneContext.__init__``."""

# Tensor intrinsics that MetaSchedule's default design spaces of a target kind refer to. Importing the
# whole package instead costs 22 to 38 s in every process.
_INTRINSICS = {
    "llvm": ("x86", "arm_cpu"),
    "c": ("x86",),
    "cuda": ("cuda",),
    "rocm": ("rocm",),
    "metal": ("metal",),
}
_ARM = ("aarch64", "arm64", "armv7l")


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


def setup_tvm(kind: str = "llvm") -> None:
    """Make MetaSchedule usable at once: register the tensor intrinsics of one target kind only.

    ``TuneContext.__init__`` imports ``tvm.s_tir.tensor_intrin``, which registers those of every target
    (22 to 38 s). A package object with the same path and no contents takes its place, so that each
    family of intrinsics is still importable by name, and only the ones needed are imported here (0.2 s).

    Parameters
    ----------
    kind : str
        TVM target kind, such as ``"llvm"`` or ``"cuda"``.
    """
    check_versions()
    import platform

    import tvm.s_tir

    name = "tvm.s_tir.tensor_intrin"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
        parent: Any = tvm.s_tir
        parent.tensor_intrin = package
    families = _INTRINSICS.get(kind, ())
    if kind == "llvm":
        families = ("arm_cpu",) if platform.machine().lower() in _ARM else ("x86",)
    for family in families:
        importlib.import_module(f"{name}.{family}")
