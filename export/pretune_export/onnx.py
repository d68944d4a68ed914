"""Export the networks to ONNX, check them against torch, and lay out a weights folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from safetensors.torch import save_file

from pretune.features.schema import ACTION, SCHEMA_VERSION, STATE_BLOCK, STATE_LOOP, SUMMARY
from pretune.features.state import MAX_LOOPS
from pretune.hardware.hardware import VECTOR_SIZE
from pretune.hub.validate import write_reference
from pretune.model.weights import FORMAT_VERSION, MAX_IR, MAX_OPSET
from pretune_export.folded import folded
from pretune_export.nets import WorldModelNet, load_net

TOLERANCE = 1e-4
"""Largest difference between torch and ONNX Runtime, relative to the largest output."""


def export_weights(
    net: WorldModelNet,
    out: Path,
    *,
    name: str,
    covers: dict[str, str],
    measured_on: Sequence[dict],
    quality: dict[str, float],
    provenance: dict[str, Any],
) -> Path:
    """Write a weights folder: ONNX files, safetensors, config and manifest (the card is `card.write_card`'s).

    Parameters
    ----------
    net : WorldModelNet
    out : pathlib.Path
        ``hub_cards/<target>``.
    name : str
        Name of the weights, such as ``"cpu-x86-64-v4"``.
    covers : dict
        ``kind``, ``arch``, ``isa_level`` of the hardware they are for.
    measured_on : sequence of dict
        The machines that measured the training data, as `pretune.model.weights.MeasuredOn`.
    quality : dict
        Figures of the evaluation.
    provenance : dict
        How the weights were made, for the manifest.

    Raises
    ------
    RuntimeError
        If ONNX Runtime and torch disagree.
    """
    net = net.eval()
    worst = export_networks(net, out)
    save_file({k: v.contiguous() for k, v in net.state_dict().items()}, out / "model.safetensors",
              metadata={"sizes": json.dumps(net.sizes.to_dict())})  # fmt: skip
    config = {
        "format_version": FORMAT_VERSION,
        "min_sdk_version": "0.1.0",
        "tvm": ">=0.26,<0.28",
        "feature_schema": SCHEMA_VERSION,
        "onnx": {"opset": MAX_OPSET, "ir": MAX_IR},
        "covers": covers,
        "measured_on": list(measured_on),
        "sizes": net.sizes.to_dict(),
        "name": name,
        "quality": quality,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_reference(out)
    write_manifest(out, {**provenance, "parity": worst, "exported": _now()})
    return out


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def export_again(folder: Path) -> float:
    """Write the ONNX files of a weights folder anew, from its safetensors, as this version exports them.

    Returns
    -------
    float
        The largest relative difference from torch.

    Raises
    ------
    RuntimeError
        If ONNX Runtime and torch disagree.
    """
    provenance = json.loads((folder / "manifest.json").read_text())["provenance"]
    config = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
        provenance["parity"] = export_networks(load_net(folder), Path(fresh))
        shutil.copytree(Path(fresh) / "onnx", folder / "onnx", dirs_exist_ok=True)
    provenance["exported"] = _now()
    config["onnx"] = {"opset": MAX_OPSET, "ir": MAX_IR}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_reference(folder)
    write_manifest(folder, provenance)
    return provenance["parity"]


def export_networks(net: WorldModelNet, out: Path) -> float:
    """Write ``onnx/`` of a weights folder; returns the largest relative difference from torch.

    Parameters
    ----------
    net : WorldModelNet
        In evaluation mode.
    out : pathlib.Path
        The weights folder.

    Raises
    ------
    RuntimeError
        If ONNX Runtime and torch disagree.
    """
    (out / "onnx").mkdir(parents=True, exist_ok=True)
    light = folded(net)
    for part, (module, inputs, dynamic, outputs) in _parts(net).items():
        _export(light.get(part, module), inputs, dynamic, outputs, out / "onnx" / f"{part}.onnx")
    return check_parity(net, out)


def write_manifest(out: Path, provenance: dict[str, Any]) -> None:
    """Hash every file of a weights folder into ``manifest.json``."""
    files = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file() and p.name != "manifest.json"):
        data = path.read_bytes()
        files[path.relative_to(out).as_posix()] = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
        }
    manifest = {"files": files, "provenance": provenance}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


def _example(n: int, blocks: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(n * 31 + blocks)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=make)

    mask = torch.ones(n, blocks)
    mask[:, blocks // 2 + 1 :] = 0
    return {
        "blocks": rand(n, blocks, len(STATE_BLOCK)),
        "loops": rand(n, blocks, MAX_LOOPS, len(STATE_LOOP)),
        "mask": mask, "type": torch.tensor([1]), "a": rand(n, len(ACTION)), "summary": rand(n, len(SUMMARY)),
        "hardware": rand(1, VECTOR_SIZE),
    }  # fmt: skip


def _parts(net: WorldModelNet, n: int = 4, blocks: int = 6) -> dict[str, tuple]:
    x = _example(n, blocks)
    make = torch.Generator().manual_seed(7)
    z = torch.rand(n, net.sizes.latent, generator=make)
    rows = torch.export.Dim("n", min=1, max=1 << 20)
    width = torch.export.Dim("blocks", min=1, max=4096)
    return {
        "encoder": (
            net.encoder, {k: x[k] for k in ("blocks", "loops", "mask")},
            {"blocks": {0: rows, 1: width}, "loops": {0: rows, 1: width}, "mask": {0: rows, 1: width}}, ["z"],
        ),
        "action": (
            net.action, {"type": x["type"], "a": x["a"]}, {"type": None, "a": {0: rows}}, ["action"],
        ),
        "transition": (
            net.transition, {"z": z, "action": torch.rand(n, net.sizes.transition_hidden, generator=make)},
            {"z": {0: rows}, "action": {0: rows}}, ["z_next"],
        ),
        "ranker": (
            net.ranker, {"z": z, "summary": x["summary"], "hardware": x["hardware"]},
            {"z": {0: rows}, "summary": {0: rows}, "hardware": None}, ["score", "embedding"],
        ),
    }  # fmt: skip


def _export(module: torch.nn.Module, inputs: dict, dynamic: dict, outputs: list[str], path: Path) -> None:
    program = torch.onnx.export(
        module, (), kwargs=inputs, dynamic_shapes=dynamic, input_names=list(inputs), output_names=outputs,
        opset_version=MAX_OPSET, dynamo=True, external_data=False, optimize=True, verbose=False,
    )  # fmt: skip
    model = program.model_proto
    model.ir_version = min(model.ir_version, MAX_IR)
    for node in model.graph.node:
        del node.metadata_props[:]  # stack traces of the exporting machine
    del model.metadata_props[:]
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


@torch.no_grad()
def check_parity(net: WorldModelNet, folder: Path) -> float:
    """Compare ONNX Runtime with torch at several sizes; returns the largest relative difference.

    Raises
    ------
    RuntimeError
        If it is above `TOLERANCE`.
    """
    worst = 0.0
    for n, blocks in ((1, 1), (1, 9), (7, 3), (300, 20)):
        for part, (module, inputs, _dynamic, _outputs) in _parts(net, n, blocks).items():
            session = ort.InferenceSession(
                str(folder / "onnx" / f"{part}.onnx"), providers=["CPUExecutionProvider"]
            )
            got = session.run(None, {k: v.numpy() for k, v in inputs.items()})
            want = module(**inputs)
            want = want if isinstance(want, tuple) else (want,)
            for a, b in zip(got, want, strict=True):
                worst = max(worst, float(np.abs(a - b.numpy()).max() / max(np.abs(b.numpy()).max(), 1e-3)))
    if worst > TOLERANCE:
        raise RuntimeError(
            f"ONNX Runtime and torch differ by {worst:.2e} in {folder}, more than {TOLERANCE:.0e}"
        )
    return worst
