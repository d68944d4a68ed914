"""Model cards, written from measured results only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

NAMES = {"top1": "top-1 score", "top5": "top-5 score", "spearman": "Spearman correlation"}


def write_card(folder: Path, evaluation: dict[str, Any], search: dict[str, Any] | None = None) -> Path:
    """Write ``README.md`` of a weights folder.

    Parameters
    ----------
    folder : pathlib.Path
        With ``config.json``, ``manifest.json`` and ``model.safetensors``.
    evaluation : dict
        From `evaluate.evaluate`.
    search : dict, optional
        ``note`` and ``figures`` of a search benchmark, as measured.
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
    text = environment.get_template("card.md.jinja").render(
        config=config,
        provenance=provenance,
        evaluation=evaluation,
        main=evaluation[evaluation["main"]],
        search=search,
        parameters=parameters,
        names=NAMES,
    )
    path = folder / "README.md"
    path.write_text(text)
    return path


def search_figures(bench: dict[str, Any]) -> dict[str, Any]:
    """What a card quotes of the JSON of ``pretune bench search``."""
    note = (
        f"`pretune bench search`: {bench['compared']} subgraph runs of networks that training never saw, "
        f"pretune at {bench['trials']} trials against stock MetaSchedule (EvolutionarySearch, XGBModel) at "
        f"{bench['baseline_trials']}, same builder and runner, winners timed again in turns, on "
        f"{bench['cpu']} ({bench['microarch']}, {bench['cores']} cores). "
        "MetaSchedule latency / pretune latency:"
    )
    named = {
        "geometric mean": bench["geomean"],
        "median": bench["median"],
        "geometric mean, unmeasured first choice": bench["geomean_zero"],
    }
    return {"note": note, "figures": {k: f"{v:.2f}" for k, v in named.items() if v is not None}}
