"""What pretraining depends on."""

from __future__ import annotations

import msgspec


class PretrainConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that pretraining depends on, beside the trajectories.

    Attributes
    ----------
    epochs : int
        Passes over all design spaces.
    groups_per_batch, per_group : int
        Design spaces of a batch, and most trajectories of each.
    learning_rate, weight_decay : float
    align, contrast, nest, stores, valid : float
        Weights of the losses (`losses`).
    margin : float
        By how much a predicted latent has to be nearer to its own real one than to any other.
    save_every : int
        Batches between checkpoints.
    validate_tasks : int
        Most validation tasks of each target that are looked at after an epoch.
    sizes : dict
        `nets.Sizes`: those of the model that is to start from it.
    """

    epochs: int = 8
    groups_per_batch: int = 24
    per_group: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    align: float = 1.0
    contrast: float = 1.0
    nest: float = 0.5
    stores: float = 0.5
    valid: float = 0.1
    margin: float = 0.2
    save_every: int = 500
    validate_tasks: int = 60
    seed: int = 0
    threads: int = 2
    sizes: dict[str, int] = msgspec.field(default_factory=dict)
