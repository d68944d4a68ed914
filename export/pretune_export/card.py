"""Model cards, written from measured results only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

COLUMNS = {
    "top1": "top-1", "top5": "top-5", "weighted_top1": "weighted top-1", "weighted_top5": "weighted top-5",
    "spearman": "Spearman",
}  # fmt: skip
"""Figures that the tables show, and what they are called there."""


def write_card(folder: Path, evaluation: dict[str, Any]) -> Path:
    """Write ``README.md`` of a weights folder.

    Parameters
    ----------
    folder : pathlib.Path
        With ``config.json``, ``manifest.json`` and ``model.safetensors``.
    evaluation : dict
        From `evaluate.evaluate`.
    """
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    provenance = json.loads((folder / "manifest.json").read_text())["provenance"]
    with safe_open(folder / "model.safetensors", "np") as file:
        parameters = sum(file.get_tensor(k).size for k in file.keys())  # noqa: SIM118 (no mapping)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pretune_export", "."),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["figures"] = _figures
    text = environment.get_template("card.md.jinja").render(
        config=config,
        provenance=provenance,
        evaluation=evaluation,
        main=evaluation[evaluation["main"]],
        parameters=parameters,
        columns=COLUMNS,
    )
    path = folder / "README.md"
    path.write_text(text)
    return path


def _figures(found: dict[str, float], *names: str) -> str:
    """Cells of a table; a dash for a figure that there is none of."""
    return " | ".join(f"{found[name]:.3f}" if name in found else "-" for name in names or COLUMNS)
