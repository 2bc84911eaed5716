"""Calibrated class probabilities by Venn-Abers predictors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ffcp.batch import BatchOutput
from ffcp.classification.names import label_tensor
from ffcp.classification.scores import checked_labels, refuse_probabilities
from ffcp.conformal.score import Score
from ffcp.conformal.venn_abers import VennAbersRows
from ffcp.network import arrays
from ffcp.network.inputs import RowBuffer
from ffcp.network.model_output import Output
from ffcp.predictor import Predictor, steady


class Pair(NamedTuple):
    """Two probabilities, one for each label that the row may have.

    Attributes
    ----------
    p0, p1 : Tensor
        The fit of isotonic regression with the row added as a negative, and as a positive example
        of the class. For two classes that of class 1, (n,); for more those of each class against
        the rest, (n, classes).
    """

    p0: Tensor
    p1: Tensor


@dataclass(frozen=True)
class LogOdds(Score):
    """The logarithm of the odds of class 1, or of each of several classes against the rest."""

    takes_infinity = False

    def score(self, out: BatchOutput, y: Tensor) -> Tensor:
        """Return the log odds of calibration rows; raise if a label is not a class."""
        scores = self.of_rows(out)
        if out.output.dim() == 2 and out.output.shape[1] > 1:
            refuse_probabilities(out.output)
        classes = out.output.new_empty(len(out.output), max(2, scores.shape[1]))
        checked_labels(y, out._replace(output=classes))
        return scores

    def of_rows(self, out: BatchOutput) -> Tensor:
        """Return the log odds, (n, 1) for two classes and (n, K) for K classes."""
        logits = out.output.double()
        logits = logits[:, None] if logits.dim() == 1 else logits
        if logits.dim() != 2:
            raise ValueError(
                f"the model's output has shape {tuple(out.output.shape)}: Venn-Abers needs logits, "
                "(n, K) for K classes, or (n,) or (n, 1) for two classes"
            )
        arrays.check_finite(logits, "the model's output", out.rows[0])
        if logits.shape[1] == 1:
            return logits
        if logits.shape[1] == 2:
            return logits[:, 1:] - logits[:, :1]
        logs = logits.log_softmax(dim=1)
        odds = logs - torch.log1p(-logs.exp())
        # For the most probable class 1 - p is lost in rounding: sum the others instead.
        top = logits.argmax(dim=1, keepdim=True)
        others = logits.scatter(1, top, -torch.inf).logsumexp(dim=1, keepdim=True)
        return odds.scatter(1, top, logits.gather(1, top) - others)


class VennAbers(Predictor):
    """Calibrated probabilities of a classifier, by inductive Venn-Abers predictors.

    Parameters
    ----------
    model : nn.Module
        A trained classifier; forward returns logits: (n, K) for K classes, or, for two classes,
        the logit of class 1, (n,) or (n, 1).
    batch_size : int, default=None
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.
    output : str, int or callable, default=None
        Which part of the model's return value is the prediction, if it is a tuple, a dict or
        similar: a key (``"logits"``), an index, or a function.

    Notes
    -----
    For exchangeable rows and two classes, the member of the pair of :meth:`predict_pair` that
    belongs to the row's true label is perfectly calibrated. The two differ by about the influence
    of one row. With more classes this holds for each class against the rest; dividing the
    probabilities by their sum is a convenience without a guarantee.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> x, model = torch.randn(900, 3), nn.Linear(3, 2)  # yours is trained
    >>> y = torch.distributions.Categorical(logits=model(x) / 3).sample()  # it is overconfident
    >>> venn = VennAbers(model).calibrate(x[:800], y[:800])
    >>> venn.predict_proba(x[800:]).shape
    torch.Size([100, 2])
    >>> p0, p1 = venn.predict_pair(x[800:])
    >>> bool((p0 < p1).all())
    True
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int | None = None, output: Output = None
    ) -> None:
        super().__init__(model, LogOdds(), VennAbersRows(), batch_size=batch_size, output=output)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        return {"batch_size": self.batch_size, "output": self.output}

    def read_target(self, y: Any) -> Tensor:
        """Return the class number of each row."""
        return label_tensor(y, None)

    @steady
    def predict_pair(self, x: Any) -> Pair:
        """Return the pair of probabilities, for each label that a row may have.

        Parameters
        ----------
        x : array-like or loader
            Inputs, as the model takes them, or a loader of inputs.

        Returns
        -------
        Pair
            ``(p0, p1)``: for two classes those of class 1, (n,) each; for more those of each
            class against the rest, (n, classes).
        """
        return self._pair(x)

    def _pair(self, x: Any) -> Pair:
        state, rows = self.calibrated(), self.rows(x)
        buffer = RowBuffer(rows.count)
        for out, *_ in self.batch_outputs(rows):
            p0, p1 = state.calibration.pairs(state.score.of_rows(out))  # type: ignore[attr-defined]
            buffer.add({"p0": p0, "p1": p1})
        p0, p1 = buffer["p0"], buffer["p1"]
        return Pair(p0[:, 0], p1[:, 0]) if p0.shape[1] == 1 else Pair(p0, p1)

    @steady
    def predict_proba(self, x: Any) -> Tensor:
        """Return the probability of each class, (n, classes); rows sum to 1.

        A pair is merged as p1 / (1 - p0 + p1), which has the smallest log loss in the worst case;
        for several classes the results are divided by their sum.

        Parameters
        ----------
        x : array-like, frame, tuple or dict
            Inputs, a row each.
        """
        p0, p1 = self._pair(x)
        merged = p1 / (1 - p0 + p1)
        if merged.dim() == 1:
            return torch.stack([1 - merged, merged], dim=1)
        return merged / merged.sum(dim=1, keepdim=True)

    def forward(self, x: Any) -> Tensor:
        """Return probabilities, as :meth:`predict_proba` does: ``venn(x)``."""
        return self.predict_proba(x)
