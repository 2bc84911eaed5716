"""The check of whether a predictor can be exported, before any work is done."""

from __future__ import annotations

from collections.abc import Iterator

from ffcp.classification.scores import RuleScore
from ffcp.conformal.by_label import ByLabel
from ffcp.conformal.calibration import Marginal
from ffcp.conformal.mondrian import Mondrian
from ffcp.network.jacobian import Sketch, Smooth
from ffcp.predictor import Predictor
from ffcp.regression.intervals import Point, Quantiles
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.regression.scaled_score import ScaledScore
from ffcp.regression.scales import Constant, GradientNorm

# Components that are pure tensor code, from the batch output to the result, for all values. Exact
# classes only: a subclass may do anything.
PIECES = {RuleScore, ScaledScore, LearnedScore, Point, Quantiles, Constant, GradientNorm}
# Calibrations whose thresholds are the same for all rows, or for all rows of a group.
CALIBRATIONS = {Marginal, ByLabel}


def check(predictor: Predictor) -> None:
    """Raise ValueError, with all reasons, if a predictor cannot be exported."""
    reasons = list(_reasons(predictor))
    if reasons:
        name = type(predictor).__name__
        raise ValueError(f"cannot export {name}: {'; '.join(reasons)}. See docs/deploy.md")


def _reasons(predictor: Predictor) -> Iterator[str]:
    state = predictor.calibrated()
    score, calibration = state.score, state.calibration
    inner = getattr(calibration, "inner", calibration)
    for piece in (score, getattr(score, "base", None), getattr(score, "scale", None), inner):
        if piece is not None and type(piece) not in PIECES | CALIBRATIONS:
            name = getattr(piece, "name", "") or type(piece).__name__
            yield f"{name!r} is not a fixed sequence of tensor operations"
    if isinstance(score, LearnedScore) and score.features.functions:
        yield "its learned score uses features computed by a Python function"
    method = score.requires().method
    if isinstance(method, (Sketch, Smooth)):
        yield f"method={method} draws random numbers: use 'exact' or 'coloured'"
    if isinstance(calibration, Mondrian) and calibration.by is not None:
        yield "its groups are computed by a Python function: calibrate with groups= instead"
