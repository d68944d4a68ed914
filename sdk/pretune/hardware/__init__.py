"""What machine this is, and the TVM target that fits it."""

from pretune.hardware.detect import CoreCount, count_cores, detect
from pretune.hardware.hardware import VECTOR_NAMES, VECTOR_SIZE, Hardware
from pretune.hardware.target import (
    check_runs_here,
    hardware_for_target,
    make_target,
    native_config,
    parse_target_string,
)

__all__ = [
    "VECTOR_NAMES",
    "VECTOR_SIZE",
    "CoreCount",
    "Hardware",
    "check_runs_here",
    "count_cores",
    "detect",
    "hardware_for_target",
    "make_target",
    "native_config",
    "parse_target_string",
]
