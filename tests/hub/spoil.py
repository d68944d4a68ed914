"""Weights folders that are not as they should be."""

from __future__ import annotations

import json
from pathlib import Path

from pretune_export.onnx import write_manifest

REPO = "pretune/cpu-x86-64-v4"


def edit(folder: Path, **changes: object) -> None:
    """Change the configuration of weights, and the manifest with it."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    rehash(folder)


def rehash(folder: Path) -> None:
    """Make the manifest anew, for whatever files there are."""
    write_manifest(folder, json.loads((folder / "manifest.json").read_text())["provenance"])


def flip(file: Path) -> None:
    """Change one bit of a file, in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
