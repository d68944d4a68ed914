"""What must hold of weights before anybody publishes them."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pretune.errors import WeightsError, one_line
from pretune.hub.integrity import check_folder
from pretune.model.weights import MAX_IR, MAX_OPSET, ONNX_FILES, Config, load_weights

QUALITY = ("top1", "top5", "spearman")
"""Figures that published weights state, of tasks that were not trained on; more is better."""

REFERENCE = "reference.json"
"""Outputs of the networks in torch on `example_inputs`, for machines without torch."""

TOLERANCE = 1e-4
"""Largest difference from the reference, relative to its largest number."""

ROUNDING = 6e-4
"""A card states figures with three digits."""


def validate(folder: Path) -> Config:
    """Check a weights folder as a whole: files, versions, figures, card and networks.

    Returns
    -------
    config : Config
        Of the weights.

    Raises
    ------
    WeightsError
        Naming what is wrong.
    """
    if faults := check_folder(folder):
        listed = "; ".join(map(str, faults))
        raise WeightsError(f"{folder}: {listed}; make it whole: pretune-export onnx, then card")
    config = load_weights(folder).config
    for name in QUALITY:
        if not math.isfinite(config.quality.get(name, math.nan)):
            raise WeightsError(
                f"{folder / 'config.json'}: quality has no {name}; run: pretune-export evaluate, then onnx"
            )
    check_card(folder, config)
    check_networks(folder, config)
    return config


def check_card(folder: Path, config: Config) -> None:
    """Check that the card has the metadata that makes weights findable, and states the measured figures.

    Raises
    ------
    WeightsError
        Naming the field.
    """
    from huggingface_hub import ModelCard

    card = folder / "README.md"
    again = "write it anew: pretune-export card"
    try:
        data = ModelCard.load(card).data
    except Exception as error:  # of the YAML parser, or of the client
        raise WeightsError(f"{card}: metadata cannot be read ({one_line(error)}); {again}") from None
    if data.get("library_name") != "pretune":
        raise WeightsError(f"{card}: library_name is not pretune; {again}")
    if not data.get("license"):
        raise WeightsError(f"{card}: names no license; {again}")
    if config.name not in (data.get("tags") or []):
        raise WeightsError(f"{card}: tags lack {config.name}; {again}")
    stated = {result.metric_type: result.metric_value for result in data.get("eval_results") or []}
    for name in QUALITY:
        if name not in stated:
            raise WeightsError(f"{card}: model-index has no {name}; {again}")
        if abs(float(stated[name]) - config.quality[name]) > ROUNDING:
            raise WeightsError(
                f"{card}: states {name} {stated[name]}, config.json {config.quality[name]:.3f}; {again}"
            )


def check_networks(folder: Path, config: Config) -> None:
    """Check that ONNX Runtime loads the networks, and that they are those of ``model.safetensors``.

    They are compared with torch where it is installed, elsewhere with the stored reference outputs.

    Raises
    ------
    WeightsError
        Naming the file, and the largest difference.
    """
    sessions = {Path(name).stem: _session(folder / name, config) for name in ONNX_FILES}
    inputs = {part: example_inputs(session) for part, session in sessions.items()}
    expected = _in_torch(folder, inputs) or _stored(folder)
    for part, session in sessions.items():
        names = [output.name for output in session.get_outputs()]
        for name, found, want in zip(names, session.run(None, inputs[part]), expected[part], strict=True):
            worst = float(np.abs(found - want).max() / max(np.abs(want).max(), 1e-3))
            if not worst <= TOLERANCE:  # NaN is none
                raise WeightsError(
                    f"{folder}/onnx/{part}.onnx: {name} differs from model.safetensors by {worst:.1e}, "
                    f"more than {TOLERANCE:.0e}; run: pretune-export onnx"
                )


def example_inputs(session: Any) -> dict[str, np.ndarray]:
    """Inputs for a network, the same everywhere: three of whatever is free, numbers spread over [0, 1)."""
    inputs = {}
    for spec in session.get_inputs():
        shape = [size if isinstance(size, int) else 3 for size in spec.shape]
        if spec.type == "tensor(int64)":
            inputs[spec.name] = np.ones(shape, np.int64)
        else:
            count = math.prod(shape)
            inputs[spec.name] = (np.arange(1, count + 1) * 0.618034 % 1).astype(np.float32).reshape(shape)
    return inputs


def write_reference(folder: Path) -> Path:
    """Write the outputs that the networks of a folder have in torch, to be checked where there is none."""
    import onnxruntime as ort

    inputs = {
        Path(name).stem: example_inputs(
            ort.InferenceSession(folder / name, providers=["CPUExecutionProvider"])
        )
        for name in ONNX_FILES
    }
    outputs = _in_torch(folder, inputs)
    assert outputs is not None, "weights are exported where torch is"
    lists = {part: [array.tolist() for array in arrays] for part, arrays in outputs.items()}
    path = folder / REFERENCE
    path.write_bytes(msgspec.json.encode(lists))
    return path


def _session(file: Path, config: Config) -> Any:
    """Load a network, after a look at whether the lowest ONNX Runtime that is promised would.

    That is told by the operator set, the IR version, and that no operators are custom: ONNX Runtime 1.22.0
    loads what has operator set 22 or IR 10 at most and refuses 23 and 11 (tried on a model of one operator
    with each), and `MAX_OPSET`, `MAX_IR` are not above. The tests run `validate` in 1.22.0 itself where pip
    can get it; so can a publisher, in an environment with that version.
    """
    import onnx
    import onnxruntime as ort

    try:
        model = onnx.load(file, load_external_data=False)
    except Exception as error:  # protobuf does not name its classes
        raise WeightsError(
            f"{file}: is no ONNX file ({one_line(error)}); run: pretune-export onnx"
        ) from error
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    if set(opsets) - {"", "ai.onnx"} or any(tensor.data_location for tensor in model.graph.initializer):
        raise WeightsError(f"{file}: uses operators or data from elsewhere; run: pretune-export onnx")
    opset, ir = max(opsets.values()), model.ir_version
    if (opset, ir) != (config.onnx.opset, config.onnx.ir) or opset > MAX_OPSET or ir > MAX_IR:
        raise WeightsError(
            f"{file}: opset {opset}, IR {ir}; config.json says {config.onnx.opset} and {config.onnx.ir}, "
            f"at most {MAX_OPSET} and {MAX_IR} are read everywhere; run: pretune-export onnx"
        )
    try:
        return ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exception classes are not public
        raise WeightsError(
            f"{file}: ONNX Runtime {ort.__version__} cannot load it ({one_line(error)})"
        ) from error


def _in_torch(folder: Path, inputs: dict[str, dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]] | None:
    """Outputs of ``model.safetensors``, by network; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    from pretune_export.nets import outputs_of

    return outputs_of(folder, inputs)


def _stored(folder: Path) -> dict[str, list[np.ndarray]]:
    file = folder / REFERENCE
    try:
        lists = msgspec.json.decode(file.read_bytes(), type=dict[str, list[Any]])
        return {part: [np.asarray(array, np.float32) for array in arrays] for part, arrays in lists.items()}
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(
            f"{file}: no reference outputs to compare with ({error}), and torch is not installed; "
            "run: pip install 'pretune[export]'"
        ) from None
