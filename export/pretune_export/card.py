"""Model cards, written from measured results only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2

CARD = """\
---
library_name: pretune
license: apache-2.0
tags: [tvm, metaschedule, cost-model, world-model, onnx, {{ config.name }}]
model-index:
- name: {{ config.name }}
  results:
  - task: {type: other, name: schedule ranking}
    dataset: {type: pretune-measured, name: pretune measured schedules (held-out networks)}
    metrics:
{%- for key in ("top1", "top5", "spearman") %}
    - {type: {{ key }}, value: {{ "%.3f"|format(evaluation.mean[key]) }}, name: {{ names[key] }}}
{%- endfor %}
---

# pretune weights: {{ config.name }}

A compiler world model for TVM MetaSchedule on {{ config.covers.kind }} {{ config.covers.arch }}, instruction set level
{{ config.covers.isa_level }}: an encoder of TensorIR programs, a transition that predicts in latent space what a schedule's
actions do, and a ranker.

## Measured on

| CPU | microarchitecture | cores | schedules | tasks | days |
|---|---|---|---|---|---|
{%- for m in config.measured_on %}
| {{ m.cpu }} | {{ m.microarch }} | {{ m.cores }} | {{ m.schedules }} | {{ m.tasks }} | {{ m.days|join(", ") }} |
{%- endfor %}

Tasks are layers of {{ provenance.train_networks }} networks; {{ evaluation.networks|length }} other networks are held out for
the figures below. None of them is ResNet-50, MobileNetV2, BERT-base, GPT-2, ResNet18-3D, OPT-1.3B or GPT-Neo-2.7B, and no
training task has the structural hash of one of the evaluation subgraphs.

## Ranking on held-out networks

{{ evaluation.tasks }} tasks, {{ evaluation.schedules }} measured schedules. Top-k: the best latency over the best latency among
the k best-ranked, mean over tasks; 1 is perfect. "Random" chooses k at random.

| network | tasks | random top-1 | top-1 | random top-5 | top-5 | Spearman |
|---|---|---|---|---|---|---|
{%- for name, r in evaluation.networks.items() %}
| {{ name }} | {{ r.tasks }} | {{ "%.2f"|format(r.random_top1) }} | {{ "%.2f"|format(r.top1) }} | {{ "%.2f"|format(r.random_top5) }} | {{ "%.2f"|format(r.top5) }} | {{ "%.2f"|format(r.spearman) }} |
{%- endfor %}
| **all** | {{ evaluation.tasks }} | {{ "%.2f"|format(evaluation.mean.random_top1) }} | **{{ "%.3f"|format(evaluation.mean.top1) }}** | {{ "%.2f"|format(evaluation.mean.random_top5) }} | **{{ "%.3f"|format(evaluation.mean.top5) }}** | **{{ "%.2f"|format(evaluation.mean.spearman) }}** |

![Ranking and rollout error](ranking.png)
{% if search %}
## Search against MetaSchedule

{{ search.note }}

| | |
|---|---|
{%- for key, value in search.figures.items() %}
| {{ key }} | {{ value }} |
{%- endfor %}
{% endif %}
## Architecture

Latent {{ config.sizes.latent }}, {{ parameters }} parameters in all. ONNX opset {{ config.onnx.opset }}, IR {{ config.onnx.ir }};
feature schema {{ config.feature_schema }}; TVM {{ config.tvm }}. `model.safetensors` holds the same weights for fine-tuning.

## Known limits

- float32 schedules of MetaSchedule's own CPU design spaces; scores compare candidates of one task, not tasks.
- Other microarchitectures of the same instruction set level are covered as `compatible`, not measured.

## How to use

```
pip install pretune
pretune tune model.onnx
```

Trained by `{{ provenance.command }}`; licence Apache-2.0.
"""

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
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(CARD)
    text = template.render(
        config=config, provenance=provenance, evaluation=evaluation, search=search, parameters=parameters, names=NAMES
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
        f"{bench['trials']} trials against stock MetaSchedule (EvolutionarySearch, XGBModel) at {bench['baseline_trials']}, "
        f"same builder and runner, winners re-measured in turns, on {machine.get('cpu', 'one machine')} "
        f"({machine.get('microarch', '')}). MetaSchedule latency / pretune latency:"
    )
    figures = {"geometric mean": f"{bench['geomean']:.2f}", "median": f"{bench['median']:.2f}"}
    if bench.get("geomean_zero"):
        figures["geometric mean, unmeasured first choice"] = f"{bench['geomean_zero']:.2f}"
    return {"note": note, "figures": figures}
