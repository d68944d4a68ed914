"""Whether a candidate computes what the untuned program computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

TOLERANCE: dict[str, tuple[float, float]] = {
    "float64": (1e-8, 1e-9),
    "float32": (1e-3, 1e-4),
    "float16": (2e-2, 5e-2),
    "bfloat16": (4e-2, 8e-2),
    "float8": (2e-1, 2e-1),
}
"""Relative and absolute tolerance by dtype; ``float8`` covers all its variants, other dtypes are compared
exactly. The absolute one is a fraction of the reference's largest magnitude: schedules reorder sums, and
the rounding error of a sum follows its terms, not its (possibly cancelled) result."""


def tolerance_of(
    dtype: str, tolerance: Mapping[str, tuple[float, float]] | None = None
) -> tuple[float, float]:
    """Relative and absolute tolerance for a dtype; (0, 0) for integers and booleans."""
    table = TOLERANCE if tolerance is None else {**TOLERANCE, **tolerance}
    if dtype not in table and dtype.startswith("float8"):
        dtype = "float8"
    return table.get(dtype, (0.0, 0.0))


def difference(
    reference: Mapping[int, np.ndarray],
    candidate: Mapping[int, np.ndarray],
    tolerance: Mapping[str, tuple[float, float]] | None = None,
) -> str | None:
    """Compare the buffers that two versions of a program left behind.

    Parameters
    ----------
    reference, candidate : mapping of int to ndarray
        The contents after one call, by argument position.
    tolerance : mapping of str to (float, float), optional
        Overrides of `TOLERANCE` by dtype.

    Returns
    -------
    str or None
        None if they agree, else one line naming the argument and its largest difference.
    """
    if reference.keys() != candidate.keys():
        return f"wrote arguments {sorted(candidate)} instead of {sorted(reference)}"
    for index in sorted(reference):
        want, got = reference[index], candidate[index]
        name = f"argument {index} ({want.dtype.name}, {'x'.join(map(str, want.shape)) or 'scalar'})"
        if want.shape != got.shape or want.dtype != got.dtype:
            return f"{name} became {got.dtype.name}, {'x'.join(map(str, got.shape)) or 'scalar'}"
        if want.size == 0 or want.tobytes() == got.tobytes():
            continue
        rtol, atol = tolerance_of(want.dtype.name, tolerance)
        if want.dtype.kind in "biu":
            bad = want != got
            distance = np.abs(want.astype(np.float64) - got.astype(np.float64))
        else:
            wide, other = want.astype(np.float64), got.astype(np.float64)
            finite = np.isfinite(wide)
            same = (wide == other) | (np.isnan(wide) & np.isnan(other))
            scale = float(np.abs(wide[finite]).max(initial=0.0))
            with np.errstate(invalid="ignore"):
                distance = np.where(same, 0.0, np.abs(wide - other))
                distance = np.where(np.isnan(distance), np.inf, distance)  # NaN or inf on one side only
                bad = distance > atol * scale + rtol * np.where(finite, np.abs(wide), 0.0)
        if bad.any():
            at = np.unravel_index(int(np.argmax(np.where(bad, distance, -1.0))), want.shape)
            where = f" at {tuple(map(int, at))}" if at else ""
            return (
                f"{name}: {int(bad.sum())} of {want.size} values differ, most{where}:"
                f" {got[at]} instead of {want[at]}"
            )
    return None


def has_nan(array: np.ndarray) -> bool:
    """Whether any value is NaN."""
    return array.dtype.kind not in "biu" and bool(np.isnan(array.astype(np.float32)).any())
