"""Predictions as columns: intervals, prediction sets, label maps and sets of risk control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch
from ray.data.block import BlockAccessor
from torch import Tensor

from ffcp.classification.set_predictor import SetPredictor
from ffcp.classification.sets import LabelSet
from ffcp.ray.columns import Arguments
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.risk.risk_control import RiskControl
from ffcp.segmentation.pixel_sets import PixelSets

Predicted = dict[str, pa.ChunkedArray]


def predicted_columns(
    predictor: Any, rows: Arguments, alphas: Sequence[Any], first_row: int
) -> Predicted:
    """Return the predictions for some rows as columns; with several levels, named by level."""
    supported = (RegressionPredictor, CrossConformal, SetPredictor, PixelSets, RiskControl)
    if not isinstance(predictor, supported):
        raise TypeError(
            f"'predictor' must return intervals or sets for independent rows, got "
            f"{type(predictor).__name__!r}"
        )
    options = {"groups": rows.groups, "weights": rows.weights}
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(predictor, (RegressionPredictor, SetPredictor)):
        options["first_row"] = first_row
    suffixes = [f"_{float(alpha):.12g}" for alpha in alphas] if len(alphas) > 1 else [""]
    columns: Predicted = {}
    if isinstance(predictor, RegressionPredictor):  # all levels in one pass
        interval = predictor.predict_interval(rows.x, list(alphas), **options)
        columns["prediction"] = _column(interval.prediction)
        for suffix, lower, upper in zip(suffixes, interval.lower, interval.upper, strict=True):
            columns |= {f"lower{suffix}": _column(lower), f"upper{suffix}": _column(upper)}
        return columns
    for alpha, suffix in zip(alphas, suffixes, strict=True):
        if isinstance(predictor, CrossConformal):
            interval = predictor.predict_interval(rows.x, alpha, **options)
            at_level = _columns(interval, "prediction", "lower", "upper")
        elif isinstance(predictor, SetPredictor):
            # From a loader labels are ordered in the same pass; but a tuple would look like (x, y).
            x = rows.x if isinstance(rows.x, tuple) else iter([rows.x])
            at_level = _label_columns(predictor.predict_set(x, alpha, **options))
        elif isinstance(predictor, PixelSets):
            maps = predictor.predict_set(rows.x, alpha, **options)
            at_level = _columns(maps, "prediction", "mask")
        else:
            at_level = _columns(predictor.predict_set(rows.x, alpha, **options), "sets", "level")
        for name, column in at_level.items():
            columns.setdefault(name if name == "prediction" else f"{name}{suffix}", column)
    return columns


def _columns(result: Any, *names: str) -> Predicted:
    """Return tensors of a result as columns."""
    return {name: _column(getattr(result, name)) for name in names}


def _label_columns(sets: LabelSet) -> Predicted:
    """Return prediction sets as columns: the best label, all labels and their number."""
    labels = [row if isinstance(row, list) else row.tolist() for row in sets.labels]
    kind = pa.int64() if sets.names is None else pa.string()
    best = [row[0] if row else None for row in labels]
    return {
        "prediction": pa.chunked_array([pa.array(best, kind)]),
        "labels": pa.chunked_array([pa.array(labels, pa.list_(kind))]),
        "size": _column(sets.sizes),
    }


def _column(tensor: Tensor) -> pa.ChunkedArray:
    """Return a column of numbers, or of tensors if a row has several."""
    flat = tensor[:, 0] if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor
    array = (flat.float() if flat.dtype == torch.bfloat16 else flat).detach().cpu().numpy()
    if array.ndim == 1:  # Ray would inspect every number first
        return pa.chunked_array([pa.array(array)])
    return BlockAccessor.batch_to_arrow_block({"column": array}).column("column")


__all__ = ["Predicted", "predicted_columns"]
