"""What can be exported, and why the rest cannot: said before anything is done."""

from __future__ import annotations

from typing import Any

from ffcp.classification.scores import RuleScore
from ffcp.classification.set_predictor import SetPredictor
from ffcp.conformal.by_label import ByLabel
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.marginal import Marginal
from ffcp.conformal.mondrian import Mondrian
from ffcp.network.jacobian import Sketch, Smooth
from ffcp.predictor import Predictor
from ffcp.regression.bases import Point, Quantiles
from ffcp.regression.learned.learned_score import LearnedScore
from ffcp.regression.learned.learners import BOOSTING
from ffcp.regression.regression_predictor import RegressionPredictor
from ffcp.regression.scaled_score import ScaledScore
from ffcp.regression.scales import Constant, GradientNorm

# Pieces that are tensor code from what the pass saw to the result, whatever the values. The very
# classes: one that is derived from them may do anything.
FAMILIES: tuple[type, ...] = (ScaledScore, LearnedScore)
PARTS: tuple[type, ...] = (Point, Quantiles, Constant, GradientNorm)
# Whose thresholds are the same for all rows, or for all of a group.
CALIBRATIONS: tuple[type, ...] = (Marginal, ByLabel)


def check(predictor: Predictor) -> None:
    """Refuse a predictor whose pieces cannot become a graph, and say which and why."""
    reasons = list(_reasons(predictor))
    if reasons:
        raise ValueError(
            f"this {type(predictor).__name__} cannot be exported: {'; '.join(reasons)}. Nothing "
            "was written"
        )


def _reasons(predictor: Predictor) -> Any:
    state = predictor.calibrated()
    scorer, calibration = state.scorer, state.calibration
    if isinstance(predictor, SetPredictor):
        if type(scorer) is not RuleScore:
            yield f"its label score is {_called(scorer)}, {_FOREIGN}"
    elif not isinstance(predictor, RegressionPredictor):
        yield f"predictors of {predictor.task} have no graph"
    elif type(scorer) not in FAMILIES:
        yield (
            f"its bands are those of {_called(scorer)}, which are no fixed number of steps"
            if type(scorer).__module__.startswith("ffcp.")
            else f"its bands are those of {_called(scorer)}, {_FOREIGN}"
        )
    else:
        for part in (getattr(scorer, name, None) for name in ("base", "scale")):
            if part is not None and type(part) not in PARTS:
                yield f"{_called(part)} is {_FOREIGN}"
    if isinstance(scorer, LearnedScore) and scorer.sight.functions:
        yield f"it learned from {_FOREIGN}"
    if isinstance(scorer, LearnedScore) and scorer.kind == BOOSTING:
        yield "boosted trees jump where a file rounds otherwise: learner='network' does not"
    method = scorer.requires().method
    if isinstance(method, (Sketch, Smooth)):
        yield f"method={method} draws random numbers: use 'exact' or 'coloured'"
    yield from _reasons_of(calibration)


def _reasons_of(calibration: Calibration) -> Any:
    if isinstance(calibration, Mondrian) and calibration.by is not None:
        yield "its groups come from a Python function: calibrate with groups=, which are an input"
    inner = getattr(calibration, "inner", calibration)
    if not type(inner).__module__.startswith("ffcp."):
        yield f"its calibration is {_called(inner)}, {_FOREIGN}"
    elif type(inner) not in CALIBRATIONS:
        yield (
            f"thresholds of {_called(inner)} have no graph: only those of "
            f"ffcp.calibrations.Marginal and "
            "ffcp.calibrations.ByLabel do, also in groups"
        )


_FOREIGN = "a Python function or class of your own, which torch cannot be trusted to write down"


def _called(piece: Any) -> str:
    return str(getattr(piece, "name", "") or type(piece).__name__)
