"""The description of a machine, and the vector that the ranker reads of it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import msgspec
import numpy as np

X86_FLAGS = {
    "sse2": "sse2",
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "popcnt": "popcnt",
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "lzcnt": "abm",
    "movbe": "movbe",
    "gfni": "gfni",
    "avxvnni": "avx_vnni",
    "avxvnniint8": "avx_vnni_int8",
    "avxifma": "avx_ifma",
    "avxneconvert": "avx_ne_convert",
    "avx512f": "avx512f",
    "avx512cd": "avx512cd",
    "avx512bw": "avx512bw",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512bitalg": "avx512_bitalg",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
    "amx-fp16": "amx_fp16",
}
"""Instruction sets the code generator makes use of: LLVM's name to the flag in ``/proc/cpuinfo``."""

ARM_FLAGS = {
    "neon": "asimd",
    "lse": "atomics",
    "rdm": "asimdrdm",
    "fullfp16": "asimdhp",
    "dotprod": "asimddp",
    "fp16fml": "asimdfhm",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
}
"""The same for 64-bit ARM, where ``/proc/cpuinfo`` calls them Features."""

_LEVELS = {
    "x86-64-v2": ("sse3", "ssse3", "sse4.1", "sse4.2", "popcnt"),
    "x86-64-v3": ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe"),
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}

VECTOR_SIZE = 16
VECTOR_NAMES = (
    "cores",
    "vector_bits",
    "l1d",
    "l2",
    "l3",
    "clock",
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "amx",
    "neon",
    "sve",
    "peak",
    "is_gpu",
    "spare",
)
"""Name of each entry of `Hardware.vector`."""


def flags_of(arch: str) -> dict[str, str]:
    """Table of the instruction sets that matter on an architecture: LLVM's name to the kernel's."""
    return {"x86_64": X86_FLAGS, "aarch64": ARM_FLAGS}.get(arch, {})


def isa_level_of(arch: str, isa: Collection[str]) -> str:
    """Name the instruction-set level that published weights are keyed by.

    Parameters
    ----------
    arch : str
        ``"x86_64"``, ``"aarch64"`` or another architecture.
    isa : collection of str
        Instruction sets by LLVM's names.

    Returns
    -------
    level : str
        ``"x86-64"``, ``"x86-64-v2"``, ``"x86-64-v3"``, ``"x86-64-v4"``; ``"aarch64"``, ``"aarch64-sve"``,
        ``"aarch64-sve2"``; elsewhere the architecture.
    """
    if arch == "x86_64":
        level = "x86-64"
        for name, needed in _LEVELS.items():
            if not all(flag in isa for flag in needed):
                break
            level = name
        return level
    if arch == "aarch64":
        return "aarch64-sve2" if "sve2" in isa else "aarch64-sve" if "sve" in isa else "aarch64"
    return arch


def flags_of_level(level: str) -> tuple[str, ...]:
    """Instruction sets that a level of `isa_level_of` asks for, with those of the levels below it."""
    if level in _LEVELS:
        names = list(_LEVELS)
        return tuple(flag for name in names[: names.index(level) + 1] for flag in _LEVELS[name])
    return {"aarch64-sve": ("sve",), "aarch64-sve2": ("sve", "sve2")}.get(level, ())


def vector_bits_of(isa: Collection[str], sve_bits: int = 128) -> int:
    """Widest vector register that the instruction sets bring, in bits; 64 for none at all.

    Parameters
    ----------
    isa : collection of str
        Instruction sets by LLVM's names.
    sve_bits : int
        Length of an SVE register, which the instruction set leaves to the chip.
    """
    if "avx512f" in isa:
        return 512
    if "avx" in isa:
        return 256
    if "sve" in isa:
        return max(sve_bits, 128)
    return 128 if "sse2" in isa or "neon" in isa else 64


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, as far as the speed of a schedule depends on it.

    Parameters
    ----------
    vendor : str
        ``"intel"``, ``"amd"``, ``"arm"``, ``"apple"``, ``"nvidia"`` ...; ``"unknown"``.
    model_name : str
        The name the machine gives itself.
    microarch : str
        The microarchitecture as LLVM names it (``"znver4"``), or a GPU architecture (``"sm_80"``).
    arch : str
        ``"x86_64"``, ``"aarch64"`` ...
    isa : tuple of str
        Instruction sets by LLVM's names, sorted, of those that a code generator makes use of.
    isa_level : str
        See `isa_level_of`; for a GPU its architecture.
    vector_bits : int
        Widest vector register in bits; for a GPU a warp of 32-bit lanes.
    cores : int
        Physical cores this process may use (affinity and cgroup quota); for a GPU its multiprocessors.
    l1d_bytes, l2_bytes, l3_bytes : int
        Cache sizes in bytes as one core sees them; 0 for a level that does not exist. For a GPU the first
        is the shared memory of a block.
    clock_ghz : float
        Highest clock the machine reports.
    memory_bytes : int
        Memory this process may use.
    kind : str
        ``"cpu"`` or ``"cuda"``.
    """

    vendor: str
    model_name: str
    microarch: str
    arch: str
    isa: tuple[str, ...]
    isa_level: str
    vector_bits: int
    cores: int
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int
    clock_ghz: float
    memory_bytes: int
    kind: Literal["cpu", "cuda"] = "cpu"

    @property
    def peak_gflops(self) -> float:
        """Rough float32 peak in 1e9 operations a second: two vector units a core assumed, four on a GPU."""
        lanes = self.vector_bits / 32
        units = 4 if self.kind == "cuda" else 2
        fused = 2 if self.kind == "cuda" or {"fma", "neon"} & set(self.isa) else 1
        return self.cores * self.clock_ghz * lanes * units * fused

    def vector(self) -> np.ndarray:
        """Input of the ranker: float32, shape ``[16]``, every entry in [0, 4].

        ===== ============ =========================================================
        index name         value, before it is cut off at 0 and 4
        ===== ============ =========================================================
        0     cores        log2(cores) / 2
        1     vector_bits  log2(vector_bits) - 6
        2     l1d          log2(L1 data KiB) - 4
        3     l2           (log2(L2 KiB) - 8) / 2
        4     l3           log2(L3 MiB) / 2.5; 0 without one
        5     clock        GHz / 2
        6     avx2         1 or 0
        7     fma          1 or 0 (1 with NEON, which always has it)
        8     avx512f      1 or 0
        9     avx512_vnni  1 or 0 (AVX-512 or AVX encoding)
        10    amx          1 or 0
        11    neon         1 or 0
        12    sve          1 or 0
        13    peak         (log2(`peak_gflops`) - 4) / 3
        14    is_gpu       1 or 0
        15    spare        0
        ===== ============ =========================================================

        Weights are trained with this layout: a change is a new feature schema.
        """
        isa = set(self.isa)

        def log2(value: float) -> float:
            return math.log2(max(value, 1e-9))

        values = (
            log2(self.cores) / 2,
            log2(self.vector_bits) - 6,
            log2(self.l1d_bytes / 1024) - 4,
            (log2(self.l2_bytes / 1024) - 8) / 2,
            log2(self.l3_bytes / 2**20) / 2.5,
            self.clock_ghz / 2,
            "avx2" in isa,
            bool({"fma", "neon"} & isa),
            "avx512f" in isa,
            bool({"avx512vnni", "avxvnni"} & isa),
            bool({"amx-int8", "amx-bf16", "amx-fp16"} & isa),
            "neon" in isa,
            "sve" in isa,
            (log2(self.peak_gflops) - 4) / 3,
            self.kind == "cuda",
            0,
        )
        return np.clip(np.asarray(values, dtype=np.float32), 0, 4)
