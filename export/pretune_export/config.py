"""What training depends on."""

from __future__ import annotations

import msgspec


class TrainConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything a training run depends on. Files in ``configs/`` hold one each.

    What is left at its default is not written: a new setting makes no earlier run another one.

    Attributes
    ----------
    datasets : list of str
        Dataset folders: their training tasks are trained on, their validation tasks choose the epoch.
    test_datasets : list of str
        Dataset folders that only `evaluate` reads.
    isa_level : str
        The lowest instruction set level that the weights are for; by default that of the datasets.
    validation_levels : list of str
        Levels at which validation tasks choose the epoch, `isa_level` by default. What was measured at others
        is trained on too.
    epochs, tasks_per_batch, candidates_per_task : int
    least_steps : int
        Of the optimiser: where few tasks make few steps an epoch, there are more epochs than `epochs`, and
        validation is as much rarer.
    learning_rate, weight_decay : float
    states_per_candidate : int
        Real intermediate states per trajectory, beside the final one.
    candidates_with_states : int
        Candidates per task whose real states are read.
    align, contrast, decode, true_rank : float
        Weights of the losses beside the ranking of predicted latents.
    choice : float
        Weight of what the first choice is expected to lose.
    regression : float
        Weight of the scale of the scores within the ranking loss; infinite for regression alone.
    pretrained : str
        ``pretrained.pt`` of ``pretune-export pretrain``: encoder and transition to start from, if any.
    base : str
        Weights folder whose networks are to be fine-tuned, if any: all of them, with their sizes and the
        spread of their inputs.
    base_share : float
        Share of the base in the weights that are kept, which lie on the line from the trained ones to it
        (Wortsman et al., 2022, "Robust fine-tuning of zero-shot models"). Needs `base`.
    average : float
        Decay per step of the moving average of the weights that is kept (Polyak and Juditsky, 1992), once
        there have been steps enough.
    seed : int
    threads : int
        Of each process that trains.
    without : str
        One part to leave out, to see what it is worth (`ABLATIONS`).
    validate_every : int
        Epochs from one look at the validation tasks to the next.
    sizes : dict
        `pretune_export.nets.Sizes` that differ from the default.
    """

    datasets: list[str]
    test_datasets: list[str] = msgspec.field(default_factory=list)
    isa_level: str = ""
    validation_levels: list[str] = msgspec.field(default_factory=list)
    epochs: int = 40
    tasks_per_batch: int = 8
    candidates_per_task: int = 48
    least_steps: int = 0
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    states_per_candidate: int = 2
    candidates_with_states: int = 16
    align: float = 1.0
    contrast: float = 0.1
    decode: float = 0.5
    true_rank: float = 0.5
    choice: float = 0.0
    regression: float = 0.3
    pretrained: str = ""
    base: str = ""
    base_share: float = 0.0
    average: float = 0.995
    without: str = ""
    seed: int = 0
    threads: int = 2
    validate_every: int = 2
    sizes: dict[str, int] = msgspec.field(default_factory=dict)


ABLATIONS = {
    "transition": "no transition: the ranker sees the initial state",
    "actions": "no action features in the ranker",
    "state": "no program state in the ranker",
    "hardware": "no hardware vector",
    "ranking": "regression instead of ranking",
    "rollouts": "single steps instead of rollouts",
}
"""Parts that `TrainConfig.without` can leave out."""
