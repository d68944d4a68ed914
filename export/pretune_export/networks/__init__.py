"""The corpus: networks whose layers are the tuning tasks that pretune's models are trained on.

None of the networks of the evaluation suite is here. `NETWORKS` has the architectures, `SPLITS` divides them
into training and validation by family, `tasks_of` takes one through the product's own intake, and
`build_corpus` writes the tasks of all of them to a file (``pretune-export corpus``). `build_suite` writes
those of the evaluation suite, for tests only (``pretune-export suite``).
"""

from __future__ import annotations

from .blocks import Network
from .corpus import CorpusTask, build_corpus, build_suite, forbidden_task_ids, load_corpus, tasks_of
from .registry import NETWORKS, SPLITS, VALIDATION_FAMILIES

__all__ = [
    "NETWORKS",
    "SPLITS",
    "VALIDATION_FAMILIES",
    "CorpusTask",
    "Network",
    "build_corpus",
    "build_suite",
    "forbidden_task_ids",
    "load_corpus",
    "tasks_of",
]
