"""What tests use of the core beside its public names: here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import Tensor

import ffcp
from ffcp import files
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.selection import Division
from ffcp.regression.learned import network

C = TypeVar("C", bound=ffcp.calibrations.Calibration)


def filled(calibration: C, scores: Tensor, metadata: Mapping[str, Any] | None = None) -> C:
    """Return a calibration, which had no scores, with these scores."""
    calibration.add(scores, metadata)
    return calibration


def threshold(
    calibration: ffcp.calibrations.Calibration,
    alpha: Any,
    metadata: Mapping[str, Any] | None = None,
    random: Draws | None = None,
) -> Tensor:
    """Return the thresholds: (m,) for all rows, or (n, m) with one for each row."""
    return calibration.threshold(alpha, metadata, random)


def set_aside(
    rows: int | range,
    fraction: float = 0.2,
    seed: int = 0,
    most: int = 10_000,
    early: int = 0,
) -> Tensor:
    """Mark which rows of a stream, the first ones or a range, are set aside for a selection."""
    rows = rows if isinstance(rows, range) else range(rows)
    return Division(fraction, seed, most, early).mask(rows)


def config(predictor: Any) -> dict[str, Any]:
    """Return what scores and thresholds depend on besides the model and the data."""
    settings: dict[str, Any] = predictor.settings()
    return settings


def rewrite(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change the tensors of a saved calibration, and its description, and seal it again."""
    tensors = files.read(path)
    name = next(n for n in tensors if n.startswith("_") or n == "settings")
    sealed, prefix = tensors.pop(name), "calibration."
    kept = {n.removeprefix(prefix): tensor.clone() for n, tensor in tensors.items()}
    described = files.unseal(sealed, kept)
    change(kept, described)
    if "kept" in described:
        described["kept"]["shapes"] = {n: list(tensor.shape) for n, tensor in kept.items()}
    prefix = "" if name == "settings" else prefix
    whole = {f"{prefix}{n}": tensor.contiguous() for n, tensor in kept.items()}
    files.write(path, {**whole, name: files.seal(described, kept)})


def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train the small networks that learn a scale for three epochs only."""
    monkeypatch.setattr(network, "_EPOCHS", 3)
