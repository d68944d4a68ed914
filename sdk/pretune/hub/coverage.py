"""Which weights cover a machine: a pure function of what describes both."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pretune.hardware import Hardware
from pretune.hardware.hardware import flags_of_level
from pretune.model.weights import ISA_LEVELS, Config, Covers, MeasuredOn, Software, misfits

Coverage = Literal["measured", "compatible", "uncovered"]
COVERAGES: tuple[Coverage, ...] = ("measured", "compatible", "uncovered")

OTHER_CACHE = 2.0
"""A cache this many times larger or smaller than where the weights were measured is worth a word."""


@dataclass(frozen=True)
class Verdict:
    """What weights are worth on a machine, and why.

    Attributes
    ----------
    name : str
        Of the weights.
    accepted : bool
        Whether they can rank for the machine at all.
    coverage : str
        ``"measured"``: trained on this microarchitecture, or on this GPU. ``"compatible"``: on others with
        the same instruction set level or a lower one, or with the same GPU architecture. ``"uncovered"``: not
        for this hardware; if accepted, for a higher level of its architecture.
    reasons : tuple of str
        First what decided, then what differs from where the weights were measured.
    level : int
        Among those of one coverage, the highest comes first.
    same_cores : bool
        Whether a machine alike of as many cores measured; those come first among equals.
    """

    name: str
    accepted: bool
    coverage: Coverage
    reasons: tuple[str, ...]
    level: int = 0
    same_cores: bool = False

    @property
    def described(self) -> str:
        """Coverage and what decided it, for people."""
        reason = self.reasons[0]
        return reason if reason.startswith(self.coverage) else f"{self.coverage}: {reason}"

    @property
    def preference(self) -> tuple[int, bool, int, bool]:
        """Sorts verdicts, the best first."""
        return COVERAGES.index(self.coverage), not self.accepted, -self.level, not self.same_cores


def judge(hardware: Hardware, config: Config, software: Software) -> Verdict:
    """Judge weights for a machine, and for the versions that are installed on it.

    Parameters
    ----------
    hardware : Hardware
        As the target restricts it; see `pretune.hardware.hardware_for_target`.
    config : Config
        Of the weights.
    software : Software
        See `pretune.model.weights.installed_software`.
    """
    verdict = judge_hardware(hardware, config.name, config.covers, config.measured_on)
    wrong = tuple(misfit.what for misfit in misfits(config, software))
    if not wrong:
        return verdict
    return Verdict(config.name, False, "uncovered", wrong if verdict.accepted else verdict.reasons + wrong)


def judge_hardware(
    hardware: Hardware, name: str, covers: Covers, measured_on: Collection[MeasuredOn]
) -> Verdict:
    """`judge`, by the hardware alone."""
    levels = ("", *ISA_LEVELS.get(covers.arch, (hardware.isa_level,)))
    if (covers.kind, covers.arch) != (hardware.kind, hardware.arch):
        reason = f"for {covers.kind} {covers.arch}, this is {hardware.kind} {hardware.arch}"
        return Verdict(name, False, "uncovered", (reason,))
    if covers.isa_level not in levels:
        reason = f"for {covers.isa_level}, a level of {covers.arch} that this pretune does not know"
        return Verdict(name, False, "uncovered", (reason,))

    level = levels.index(covers.isa_level)
    if covers.isa_level and hardware.isa_level not in levels:
        reason = f"for {covers.isa_level}, the level here is unknown"
        return Verdict(name, True, "uncovered", (reason,), -level)
    if covers.isa_level and levels.index(hardware.isa_level) < level:
        lacking = [flag for flag in flags_of_level(covers.isa_level) if flag not in hardware.isa]
        reasons = (f"for {covers.isa_level}, this is {hardware.isa_level}", f"lacks {', '.join(lacking)}")
        return Verdict(name, True, "uncovered", reasons, -level)

    gpu = hardware.kind == "cuda"
    here = hardware.model_name if gpu else hardware.microarch
    alike = [m for m in measured_on if (m.cpu if gpu else m.microarch) == here]
    if alike:
        reasons = (f"measured on {here}", *_remarks(hardware, alike))
        same_cores = any(m.cores == hardware.cores for m in alike)
        return Verdict(name, True, "measured", reasons, level, same_cores)
    if gpu:
        decided = f"same architecture {covers.arch}"
    elif not covers.isa_level:
        decided = f"any {covers.arch}"
    else:
        same = "same" if covers.isa_level == hardware.isa_level else "lower"
        decided = f"{same} instruction set level {covers.isa_level}"
    others = dict.fromkeys(m.cpu if gpu else m.microarch for m in measured_on)
    elsewhere = (f"measured on {', '.join(others)}, this is {here}",) if others else ()
    return Verdict(name, True, "compatible", (decided, *elsewhere, *_remarks(hardware, measured_on)), level)


def _remarks(hardware: Hardware, measured_on: Collection[MeasuredOn]) -> list[str]:
    """How the machine differs from those that measured, where it matters for the speed of a schedule."""
    remarks = []
    unit = "multiprocessors" if hardware.kind == "cuda" else "cores"
    cores = sorted({m.cores for m in measured_on})
    if cores and hardware.cores not in cores:
        remarks.append(f"measured with {', '.join(map(str, cores))} {unit}, here {hardware.cores}")
    for name in ("l2", "l3"):
        here = getattr(hardware, f"{name}_bytes")
        known = sorted({size for m in measured_on if (size := getattr(m, f"{name}_bytes"))})
        if known and not any(size / OTHER_CACHE < here < size * OTHER_CACHE for size in known):
            sizes = ", ".join(f"{size / 2**20:g}" for size in known)
            remarks.append(f"{name.upper()} measured with {sizes} MiB, here {here / 2**20:g}")
    return remarks


def ways_on(hardware: Hardware) -> str:
    """What to do where no weights cover the hardware."""
    target = f" --target 'cuda -arch={hardware.arch}'" if hardware.kind == "cuda" else ""
    return (
        f"fine-tune weights of your own in half an hour of this machine: pretune finetune{target}; or tune "
        "without weights, with MetaSchedule's own model: ms.tune_relax"
    )
