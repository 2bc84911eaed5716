"""What the paper needs of ``ffcp`` beyond its public names: all of it is here, and nowhere else.

The other modules import ``ffcp``, ``ffcp.metrics`` and ``ffcp.segmentation``; whatever lies deeper
may move between releases, and then this module is the one to change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ffcp import FFRAPS
from ffcp.choose import RowSplit
from ffcp.classifiers import SetPredictor, run_with_norms
from ffcp.features import Cut, resolve
from ffcp.files import fingerprint, put
from ffcp.gradients import Method
from ffcp.localize import KERNELS
from ffcp.predictors import BandPredictor
from ffcp.sets import Rows, uniforms

__all__ = [
    "KERNELS",
    "BandPredictor",
    "Cut",
    "Method",
    "Replay",
    "Replayed",
    "RowSplit",
    "SetPredictor",
    "fingerprint",
    "put",
    "resolve",
    "run_with_norms",
]


class Replay(nn.Module):
    """Stands in for a network whose answers are known: gives back the logits among its inputs."""

    def forward(self, logits: Tensor, norms: Tensor) -> Tensor:
        """Return the logits."""
        return logits


class Replayed(FFRAPS):
    """FFRAPS at a feature, with gradient norms that were computed before."""

    def _features(self) -> list[str]:
        return []

    def _rows(self, batch: Any, row: int, stream: int, random_row: int) -> Rows:
        logits, norms = batch
        return Rows(logits, uniforms(self.seed, stream, random_row, len(logits)), norms)
