"""The networks under ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pretune.errors import WeightsError

if TYPE_CHECKING:
    from pretune.features import State
    from pretune.model.weights import Weights


A = TypeVar("A")
B = TypeVar("B")


class WorldModel:
    """Encode a program once, then predict what actions do to it in latent space.

    Sessions are built once; every method takes and returns float32 numpy arrays.

    Parameters
    ----------
    weights : Weights
    num_threads : int
        Batches that are scored at once. Each ONNX Runtime session runs on its caller's thread: the networks
        are small, so two batches side by side beat one batch on two threads.

    Raises
    ------
    WeightsError
        If ONNX Runtime cannot load a file.
    """

    def __init__(self, weights: Weights, num_threads: int) -> None:
        self.weights = weights
        self.num_threads = num_threads
        folder = weights.path / "onnx"
        self._encoder, self._action, self._transition, self._ranker = (
            _session(folder / f"{name}.onnx") for name in ("encoder", "action", "transition", "ranker")
        )
        self._threads = ThreadPoolExecutor(num_threads, "pretune-score")

    def map(self, function: Callable[[A], B], items: Sequence[A]) -> list[B]:
        """Apply a function to batches, `num_threads` at a time."""
        if len(items) < 2 or self.num_threads < 2:
            return [function(item) for item in items]
        return list(self._threads.map(function, items))

    def encode(self, state: State) -> np.ndarray:
        """Latent of one program: ``[latent]``."""
        feed = {
            "blocks": state.blocks[None],
            "loops": state.loops[None],
            "mask": np.ones((1, len(state.blocks)), np.float32),
        }
        return self._encoder.run(None, feed)[0][0]

    def action(self, type_id: int, a: np.ndarray) -> np.ndarray:
        """What an action brings to `step`, whatever the state it is taken in.

        Parameters
        ----------
        type_id : int
            Kind of the action, a number of `features.schema.ACTION_TYPES`.
        a : numpy.ndarray
            Features of the action, ``[n, len(schema.ACTION)]``.

        Returns
        -------
        numpy.ndarray
            ``[n, .]``
        """
        return self._action.run(None, {"type": np.array([type_id], np.int64), "a": a})[0]

    def step(self, z: np.ndarray, action: np.ndarray) -> np.ndarray:
        """Latents ``[n, latent]`` after one action: `z` is ``[n, latent]``, `action` from `action`."""
        return self._transition.run(None, {"z": z, "action": action})[0]

    def rollout(self, z0: np.ndarray, actions: list[tuple[int, np.ndarray]]) -> np.ndarray:
        """Latents after all actions: `z0` is ``[latent]``, each action ``(type_id, [n or 1, features])``."""
        n = max((len(a) for _t, a in actions), default=1)
        z = np.repeat(z0[None], n, axis=0)
        for type_id, a in actions:
            action = self.action(type_id, a)
            z = self.step(z, action if len(action) == n else np.repeat(action, n, axis=0))
        return z

    def rank(
        self, zT: np.ndarray, summary: np.ndarray, hardware: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Score final latents; higher is faster. Scores compare within one task only.

        Parameters
        ----------
        zT : numpy.ndarray
            ``[n, latent]``.
        summary : numpy.ndarray
            All actions together, ``[n, len(schema.SUMMARY)]``.
        hardware : numpy.ndarray
            `Hardware.vector`, ``[16]``.

        Returns
        -------
        score : numpy.ndarray
            ``[n]``.
        embedding : numpy.ndarray
            ``[n, embedding]``, what the score is linear in; the search adapts on it.
        """
        score, embedding = self._ranker.run(None, {"z": zT, "summary": summary, "hardware": hardware[None]})
        return score, embedding


def _session(file: Path) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exception classes are not public.
        raise WeightsError(
            f"{file}: ONNX Runtime {ort.__version__} cannot load it ({type(error).__name__}); "
            "use the weights that came with pretune (leave --weights out)"
        ) from error
