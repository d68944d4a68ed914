"""Auto-tuning of tensor programs without training.

``tune`` is the whole job: a model in, a faster one out. ``LatentSearch`` and ``CostModel`` plug the same
world model into stock MetaSchedule; ``load`` gives the model itself; ``finetune`` fits it to a machine.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

try:
    __version__ = importlib.metadata.version("pretune")
except importlib.metadata.PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
    __version__ = "0.1.0"

if TYPE_CHECKING:
    from pretune.finetuning import FineTuneResult, finetune
    from pretune.hardware import Hardware
    from pretune.metaschedule import CostModel, LatentSearch
    from pretune.tuning import TuneResult, load, tune

_LAZY = {
    "tune": "pretune.tuning",
    "load": "pretune.tuning",
    "TuneResult": "pretune.tuning",
    "finetune": "pretune.finetuning",
    "FineTuneResult": "pretune.finetuning",
    "LatentSearch": "pretune.metaschedule",
    "CostModel": "pretune.metaschedule",
    "Hardware": "pretune.hardware",
}

__all__ = [
    "CostModel",
    "FineTuneResult",
    "Hardware",
    "LatentSearch",
    "TuneResult",
    "__version__",
    "finetune",
    "load",
    "tune",
]


def __getattr__(name: str) -> Any:
    # TVM takes seconds to import: only what is used is loaded.
    if name not in _LAZY:
        raise AttributeError(f"module 'pretune' has no attribute {name!r}")
    module = importlib.import_module(_LAZY[name])
    value = getattr(module, name)
    globals()[name] = value
    return value
