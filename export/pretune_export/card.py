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
        search=search,
        parameters=parameters,
        names=NAMES,
    )
    path = folder / "README.md"
    path.write_text(text)
    return path


def search_figures(bench: dict[str, Any]) -> dict[str, Any]:
    """What a card quotes of the JSON of ``pretune bench search``."""
    rows = bench["rows"]
    machine = bench.get("machine", {})
    note = (
        f"`pretune bench search`: {len(rows)} subgraph runs of networks that training never saw, pretune at "
        f"{bench['trials']} trials against stock MetaSchedule (EvolutionarySearch, XGBModel) at "
        f"{bench['baseline_trials']}, same builder and runner, winners re-measured in turns, on "
        f"{machine.get('cpu', 'one machine')} ({machine.get('microarch', '')}). "
        "MetaSchedule latency / pretune latency:"
    )
    figures = {"geometric mean": f"{bench['geomean']:.2f}", "median": f"{bench['median']:.2f}"}
    if bench.get("geomean_zero"):
        figures["geometric mean, unmeasured first choice"] = f"{bench['geomean_zero']:.2f}"
    return {"note": note, "figures": figures}
