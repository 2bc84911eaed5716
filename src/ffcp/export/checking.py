"""The comparison of an exported file with the library: results must agree up to rounding.

The rounding of another machine is estimated on the example: eight times the largest difference
observed. Intervals are widened by it, and thresholds of prediction sets raised, so that the file's
interval contains the library's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.classification.rules import all_scores
from ffcp.export.steps import SetSteps
from ffcp.network import inputs
from ffcp.regression.intervals import Interval

_ROWS = 64  # at least this many rows are compared
_SAFETY = 8.0
_OFF = 0.05  # allowed share of rows that rounding moves across a kink


def rows_like(x: Any) -> Any:
    """Return the example's rows on the CPU; if they are few, with perturbed copies."""
    count = inputs.row_count(x)
    rows = max(count, _ROWS)
    generator = torch.Generator().manual_seed(0)

    def repeated(leaf: Tensor) -> Tensor:
        leaf = leaf.detach().cpu()[torch.arange(rows) % count]
        if leaf.is_floating_point() and rows > count:
            noise = torch.randn(leaf[count:].shape, generator=generator).to(leaf.dtype)
            leaf[count:] *= 1 + 0.01 * noise
        return leaf

    return inputs.replace(x, {key: repeated(leaf) for key, leaf in inputs.leaves(x)})


def run(data: bytes, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the outputs of a file, run by onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    arrays = {name: tensor.numpy() for name, tensor in feeds.items()}
    return [torch.from_numpy(np.asarray(result)) for result in session.run(None, arrays)]


def rounding_of_intervals(results: Sequence[Tensor], intervals: Sequence[Interval]) -> Tensor:
    """Return how much intervals must be widened, by comparing the file with the library."""
    prediction, *ends = results
    observed = least = torch.zeros_like(prediction[0])
    for number, interval in enumerate(intervals):
        lower, upper = ends[2 * number : 2 * number + 2]
        low, high, centre = (part.cpu() for part in interval)
        must_be_close("prediction", prediction, centre)
        must_be_close("lower end", lower, low)
        must_be_close("upper end", upper, high)
        for off in (prediction - centre, (lower - low).clamp_min(0), (high - upper).clamp_min(0)):
            observed = torch.maximum(observed, _largest_rounding(off))
        size = torch.stack([low, high, centre]).nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=(0, 1))
        least = torch.maximum(least, torch.finfo(size.dtype).eps * size)
    return torch.maximum(_SAFETY * observed, 4 * least + 4 * torch.finfo(least.dtype).tiny)


def rounding_of_sets(
    results: Sequence[Tensor], steps: SetSteps, out: BatchOutput, random: Tensor | None
) -> Tensor:
    """Return how much thresholds must be raised, by comparing scores with the library."""
    logits, *_, scores = results
    out = out._replace(output=out.output.cpu())
    expected = all_scores(steps.rule, steps.rows(out, random))
    must_be_close("prediction", logits, out.output)
    must_be_close("score", scores, expected, torch.finfo(logits.dtype).eps)
    off = (scores - expected).abs()
    return _SAFETY * off[off < 1e3 * torch.finfo(logits.dtype).eps].max()


def _largest_rounding(difference: Tensor) -> Tensor:
    """Return the largest difference of every output that is due to rounding."""
    finite = difference.abs().nan_to_num(0.0, 0.0, 0.0)
    limit = 1e3 * torch.finfo(difference.dtype).eps * max(1.0, float(finite.max()))
    return finite.where(finite <= max(limit, 1e-3 * float(finite.max())), 0.0).amax(dim=0)


def must_be_close(what: str, computed: Tensor, reference: Tensor, eps: float | None = None) -> None:
    """Raise ValueError if the file differs from the library in more than a few rows."""
    assert computed.shape == reference.shape, what
    eps = eps or torch.finfo(computed.dtype).eps
    computed, reference = computed.double(), reference.double()
    finite = reference[reference.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    tolerance = min(1e3 * eps, 0.1) * max(scale, 1e-30)
    same = (computed == reference) | ((computed - reference).abs() <= tolerance)
    off = ~same.reshape(len(same), -1).all(dim=1)
    if float(off.double().mean()) > _OFF:
        rows = f"{int(off.sum())} of {len(off)} rows, as in row {int(off.nonzero()[0, 0])}"
        raise ValueError(f"the {what} of onnxruntime differs from the library's in {rows}")
