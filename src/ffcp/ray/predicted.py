"""What is predicted for some rows, as columns: bands, label sets, maps, sets of a bounded risk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import singledispatch
from typing import Any

import pyarrow as pa
import torch
from ray.data.block import BlockAccessor
from torch import Tensor

from ffcp.classification.set_predictor import SetPredictor
from ffcp.ray.columns import Given
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.risk.risk_control import RiskControl
from ffcp.segmentation.pixel_sets import PixelSets

Predicted = dict[str, pa.ChunkedArray]


@singledispatch
def predicted_columns(
    predictor: Any, given: Given, alphas: Sequence[Any], first_row: int
) -> Predicted:
    """Predict some rows: columns by name; those of several levels carry the level."""
    raise TypeError(
        f"ffcp.ray.predict takes predictors of bands and of sets, each row on its own: a "
        f"{type(predictor).__name__} is none"
    )


@predicted_columns.register
def _(
    predictor: RegressionPredictor, given: Given, alphas: Sequence[Any], first_row: int
) -> Predicted:
    more = {"groups": given.groups, "weights": given.weights, "first_row": first_row}
    if len(alphas) == 1:
        band = predictor.predict_interval(given.x, alphas[0], **more)
        return _columns(prediction=band.prediction, lower=band.lower, upper=band.upper)
    band = predictor.predict_interval(given.x, alphas, **more)
    columns = _columns(prediction=band.prediction)
    for alpha, lower, upper in zip(alphas, band.lower, band.upper, strict=True):
        end = f"{float(alpha):.12g}"
        columns |= _columns(**{f"lower_{end}": lower, f"upper_{end}": upper})
    return columns


@predicted_columns.register
def _(predictor: CrossConformal, given: Given, alphas: Sequence[Any], first_row: int) -> Predicted:
    _must_lack(predictor, given, "groups", "weights")
    columns: Predicted = {}
    for alpha, end in _ends(alphas):
        band = predictor.predict_interval(given.x, alpha)
        columns |= _columns(prediction=band.prediction)
        columns |= _columns(**{f"lower{end}": band.lower, f"upper{end}": band.upper})
    return columns


@predicted_columns.register
def _(predictor: SetPredictor, given: Given, alphas: Sequence[Any], first_row: int) -> Predicted:
    more = {"groups": given.groups, "weights": given.weights, "first_row": first_row}
    columns: Predicted = {}
    for alpha, end in _ends(alphas):
        # Of a stream the labels are put in order in the same pass; two inputs may look like (x, y).
        x = given.x if isinstance(given.x, tuple) else iter([given.x])
        sets = predictor.predict_set(x, alpha, **more)
        labels = [row if isinstance(row, list) else row.tolist() for row in sets.labels]
        kind = pa.int64() if predictor.names is None else pa.string()
        if not end or alpha == alphas[0]:
            best = [row[0] if row else None for row in labels]
            columns["prediction"] = pa.chunked_array([pa.array(best, kind)])
        columns[f"labels{end}"] = pa.chunked_array([pa.array(labels, pa.list_(kind))])
        columns |= _columns(**{f"size{end}": sets.sizes})
    return columns


@predicted_columns.register
def _(predictor: PixelSets, given: Given, alphas: Sequence[Any], first_row: int) -> Predicted:
    _must_lack(predictor, given, "weights")
    columns: Predicted = {}
    for alpha, end in _ends(alphas):
        sets = predictor.predict_set(given.x, alpha, groups=given.groups)
        columns |= _columns(prediction=sets.prediction)
        columns |= _columns(**{f"mask{end}": sets.mask})
    return columns


@predicted_columns.register
def _(predictor: RiskControl, given: Given, alphas: Sequence[Any], first_row: int) -> Predicted:
    _must_lack(predictor, given, "weights")
    columns: Predicted = {}
    for alpha, end in _ends(alphas):
        sets = predictor.predict_set(given.x, alpha, groups=given.groups)
        columns |= _columns(**{f"sets{end}": sets.sets, f"level{end}": sets.level})
    return columns


def _must_lack(predictor: Any, given: Given, *names: str) -> None:
    for name in names:
        if getattr(given, name) is not None:
            raise ValueError(f"a {type(predictor).__name__} takes no {name}: leave out {name}=")


def _ends(alphas: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Give levels with the ends of the names of their columns."""
    for alpha in alphas:
        yield alpha, "" if len(alphas) == 1 else f"_{float(alpha):.12g}"


def _columns(**tensors: Tensor) -> Predicted:
    """Make columns of tensors: numbers where a row has one, else a tensor for each row."""
    columns: Predicted = {}
    for name, tensor in tensors.items():
        flat = tensor[:, 0] if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor
        plain = flat.float() if flat.dtype == torch.bfloat16 else flat
        array = plain.detach().cpu().numpy()
        if array.ndim == 1:  # Ray would look at every number first
            columns[name] = pa.chunked_array([pa.array(array)])
        else:
            columns[name] = BlockAccessor.batch_to_arrow_block({name: array}).column(name)
    return columns


__all__ = ["Predicted", "predicted_columns"]
