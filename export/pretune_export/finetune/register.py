"""From a training run to a weights folder with its card, and to where `pretune tune` finds it."""

from __future__ import annotations

import logging
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune import env
from pretune.errors import HubError, WeightsError
from pretune.hub.integrity import check_folder
from pretune.hub.sources import find_weights
from pretune.hub.validate import validate
from pretune.messages import explain_os_errors
from pretune_export.card import write_card
from pretune_export.config import TrainConfig
from pretune_export.evidence.plots import draw
from pretune_export.onnx import export_weights, write_manifest
from pretune_export.train import describe_data, load_best

if TYPE_CHECKING:
    from pretune.hardware import Hardware


def name_of(hardware: Hardware) -> str:
    """Name of weights that are fine-tuned for hardware: ``cpu-x86-64-v4-znver4-16``."""
    level = hardware.isa_level or hardware.arch
    parts = dict.fromkeys((hardware.kind, level, hardware.microarch, str(hardware.cores)))
    return "-".join(parts)


def export(config: TrainConfig, run: Path, out: Path, name: str, quality: dict[str, float]) -> Path:
    """Write the weights of a training run, unless they are there and whole; checks them against torch."""
    if out.is_dir() and not check_folder(out):
        return out
    shutil.rmtree(out, ignore_errors=True)
    found = describe_data(config)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that nobody asked for
    with warnings.catch_warnings(action="ignore"):
        return export_weights(
            load_best(run, config), out, name=name, covers=found.covers, measured_on=found.measured_on,
            quality=quality, provenance=found.provenance | {"datasets": [], "test_datasets": []},
        )  # fmt: skip


def finish(out: Path, evaluation: dict[str, Any], provenance: dict[str, Any]) -> None:
    """Write the card of exported weights, with plots, and check the folder as publishing would.

    Raises
    ------
    WeightsError
        Naming what is wrong.
    """
    draw(evaluation, out / "evaluation.png")
    write_manifest(out, provenance)
    write_card(out, evaluation)
    write_manifest(out, provenance)
    validate(out)


def register(weights: Path, name: str) -> Path:
    """Copy weights to where `pretune.hub.sources` looks for the user's own.

    Earlier ones of that name are moved aside and then replaced: nobody sees a part of either.

    Raises
    ------
    OutputError
        If the operating system refuses.
    """
    home = env.own_weights_dir()
    with explain_os_errors(home):
        home.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=home.parent))
        try:
            shutil.copytree(weights, fresh / "new")
            if (home / name).exists():
                (home / name).rename(fresh / "old")
            (fresh / "new").rename(home / name)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return home / name


def withdraw(registered: Path, weights: Path) -> str:
    """Remove registered weights that turned out to be no better, unless others took their place; says so."""
    here, ours = (folder / "model.safetensors" for folder in (registered, weights))
    if not here.exists():
        return f"{registered} was kept before, and is gone already"
    if not ours.exists() or here.read_bytes() != ours.read_bytes():
        return f"{registered} holds other weights by now, and stays"
    shutil.rmtree(registered)
    return f"{registered} was kept before, and is removed: pretune tune uses other weights again"


def used_by(registered: Path, hardware: Hardware, options: Sequence[str]) -> str:
    """Which ``pretune tune`` uses registered weights from now on.

    Parameters
    ----------
    options : sequence of str
        Without which it would be for other hardware.
    """
    try:
        found = find_weights(hardware).path
    except (WeightsError, HubError):  # a lock file that pins what is not here, say
        found = None
    command = "pretune tune" if found == registered else f"pretune tune --weights {registered}"
    return f"{command} with the same {' and '.join(options)}" if options else command
