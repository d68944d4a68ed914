"""Names and widths of all features, and the version of the whole.

Weights store `SCHEMA_VERSION`; the SDK refuses weights of another version, since the meaning of their
inputs would differ. Change it whenever any feature changes its meaning, place or scale.
"""

from __future__ import annotations

SCHEMA_VERSION = 5

CAPACITIES = (256, 512, 2 << 10, 24 << 10, 192 << 10, 768 << 10, 4 << 20, 32 << 20)
"""Bytes of the imagined memories at which reuse is summarised: the registers of SSE, AVX2 and AVX-512, and
caches from half of a first level to a large last one."""

ACCESSES = 4
"""Accesses of a block that are described: the write, then the largest reads."""

# One block's loop nest, summarised (see `pretune.features.summary.summarise`).
NEST = (
    "points", "work",
    *(f"{what}_{c}" for c in range(len(CAPACITIES)) for what in ("tile", "traffic")),
    "vector", "vector_x16", "vector_x8", "scalar",
    *(f"inner_{what}_{a}" for a in range(ACCESSES) for what in ("stride", "broadcast", "contiguous")),
    "accumulators", "inner_reduction", "parallel", "imbalance", "grain", "loops",
    "inlined", "at_root", "inner_0", "inner_1", "inner_2", "accumulator_bytes", "redundancy", "last_reduce",
    "register_traffic",
    # What `summary.unroll` gives: of the body that is left of the innermost loops, and of the loop around it.
    "unrolled", "in_registers", "body_traffic", "registers", *(f"loads_{a}" for a in range(ACCESSES)),
    "accumulated", "rolled", "rolled_reduce", "rolled_lanes", "rolled_lanes_fit",
    *(f"rolled_{what}_{a}" for what in ("broadcast", "contiguous") for a in range(ACCESSES)),
    "vector_fill_16", "vector_fill_8", "vector_fill_4", "vector_power_of_2", "vectors",
    *(f"vector_{what}_{a}" for a in range(ACCESSES) for what in ("run", "whole")),
)  # fmt: skip

# The loop an action names.
LOOP = (
    "extent", "is_spatial", "is_reduce", "from_outer", "from_inner",
    *(f"{what}_{a}" for a in range(ACCESSES) for what in ("stride", "broadcast", "contiguous")),
)  # fmt: skip

# The decision an action carries, as numbers.
FACTORS = 5
DECISION = (
    *(f"factor_{i}" for i in range(FACTORS)),
    "inner_x16",
    "inner_x8",
    "inner_odd",
    "value",
    "location",
)

# The block an action names.
BLOCK = (
    "is_reduce", "add", "mul", "div", "max", "select", "special", "cast", "int", "accesses",
    "write_bytes", "read_bytes", "itemsize", "work_share",
)  # fmt: skip

ANNOTATIONS = (
    "meta_schedule.parallel", "meta_schedule.vectorize", "meta_schedule.unroll_explicit",
    "meta_schedule.unroll_implicit", "meta_schedule.tiling_structure",
    "meta_schedule.random_compute_producer", "meta_schedule.auto_tensorize", "other",
)  # fmt: skip
ANNOTATION = (*(f"key_{k}" for k in ANNOTATIONS), "annotation_value")

ACTION = (*NEST, *LOOP, *DECISION, *BLOCK, *ANNOTATION)
"""All features of one action, in order."""

TOGETHER = (
    "all_work", "lane_work", "thread_work", *(f"bytes_{c}" for c in range(len(CAPACITIES))), "launches",
    "main_share",
)  # fmt: skip
"""Of the costliest blocks of a program together (see `pretune.features.summary.together`)."""

# What the ranker sees of all actions together.
SUMMARY = (
    *(f"main_{f}" for f in NEST),
    *(f"second_{f}" for f in NEST),
    *(f"rest_{f}" for f in NEST),
    *(f"main_{f}" for f in BLOCK),
    "unroll",
    "blocks",
    "spaces_parallel",
    *TOGETHER,
)

# The state encoder's rows: one per block, and one per loop around it.
STATE_BLOCK = (
    *NEST,
    *BLOCK,
    "is_init",
    "guarded",
    "unroll",
    "parallel_real",
    "vector_real",
    "thread_real",
    "order",
)
STATE_LOOP = (
    *LOOP,
    "serial",
    "parallel_kind",
    "vectorized",
    "unrolled",
    "thread",
    "inner_points",
    "footprint",
)

ACTION_TYPES = (
    "Postproc",  # not an instruction: what the postprocessors will make of one block
    "Split", "Fuse", "Reorder", "Merge", "LoopPartition", "AddUnitLoop", "Parallel", "Vectorize", "Unroll",
    "Bind", "ComputeAt", "ReverseComputeAt", "ComputeInline", "ReverseComputeInline", "FuseReductionEpilogue",
    "CacheRead", "CacheWrite", "ReindexCacheRead", "ReindexCacheWrite", "CacheInplace", "CacheIndex",
    "ReIndex", "ReadAt", "WriteAt", "RFactor", "DecomposeReduction", "DecomposePadding", "PadEinsum",
    "RollingBuffer", "Blockize", "BlockizeLoopsAndBlocks", "Tensorize", "Annotate", "Unannotate",
    "TransformLayout", "TransformBlockLayout", "SetAxisSeparator", "StorageAlign", "SetScope",
    "UnsafeSetDType", "UnsafeHideBufferAccess", "AnnotateBufferAccess", "DisallowAsync", "other",
)  # fmt: skip
"""Kinds of actions; an instruction that is not listed becomes the last."""

QUERIES = (
    "GetSBlock", "GetBlock", "GetLoops", "GetConsumers", "GetProducers", "GetChildBlocks", "GetOutputBlocks",
    "EnterPostproc",
)  # fmt: skip
"""Instructions that change nothing: they only name what later ones use."""
