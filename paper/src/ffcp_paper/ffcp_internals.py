"""The names of ``ffcp`` that the paper uses and that are not public.

No other module imports them: they may move between releases, and only this module has to follow.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ffcp import FFRAPS
from ffcp.batch import BatchOutput, Requires
from ffcp.classification.rules import FEATURE, LabelRows
from ffcp.classification.scores import RuleScore, top_probability
from ffcp.classification.set_methods import Named
from ffcp.classification.set_predictor import SetPredictor as SetPredictor
from ffcp.conformal.kernels import KERNELS
from ffcp.conformal.selection import Division
from ffcp.files import put
from ffcp.network.cut import Cut
from ffcp.network.features import resolve
from ffcp.network.forward import run_batch
from ffcp.network.jacobian import Method
from ffcp.network.model import fingerprint
from ffcp.regression.regression_predictor import RegressionPredictor

__all__ = [
    "KERNELS",
    "Cut",
    "Division",
    "Method",
    "RegressionPredictor",
    "Replay",
    "Replayed",
    "SetPredictor",
    "fingerprint",
    "put",
    "resolve",
    "run_with_norms",
]


def run_with_norms(model: nn.Module, x: Any, feature: str, first_row: int) -> tuple[Tensor, Tensor]:
    """Run one batch; return logits and the gradient norm of the top label's probability."""
    out = run_batch(model, x, Requires((feature,), of=top_probability), first_row)
    return out.output, out.norms[feature]


class Replay(nn.Module):
    """A model for stored logits: returns the logits it is given as input."""

    def forward(self, logits: Tensor, norms: Tensor) -> Tensor:
        """Return the logits."""
        return logits


NORMS = "input[1]"  # of a model that is replayed


class StoredNorms(RuleScore):
    """The score of FFRAPS with stored gradient norms, which are the second input."""

    def requires(self) -> Requires:
        """Require the second input: the norms are known."""
        return Requires(values=(NORMS,))

    def label_rows(self, out: BatchOutput) -> LabelRows:
        """Return the logits, random shares and gradient norms for the rule."""
        return super().label_rows(out._replace(norms={NORMS: out.values[NORMS]}))


class Replayed(FFRAPS):
    """FFRAPS at a feature, with stored gradient norms."""

    def __init__(
        self,
        model: Replay,
        *,
        delta: float | None = None,
        lam: float | None = None,
        kreg: int | None = None,
        temperature: float | str = 1.0,
        tune: str | None = None,
        seed: int = 0,
        **common: Any,
    ) -> None:
        empty = common.get("allow_zero_sets", False)
        given = (temperature, lam, kreg, delta, FEATURE, NORMS, tune)
        score = StoredNorms("ffraps", *given, allow_empty=empty)
        Named.__init__(self, model, score, seed=seed, **common)
        self.gradient = FEATURE
