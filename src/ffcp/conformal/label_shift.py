"""Label shift: the frequencies of classes have changed, the law of x given y has not.

If new rows have the ratio w to calibration rows in the shares of their classes, and the law of
x given y is the same, the threshold of candidate label k is the 1 - alpha quantile of the scores
under weights w(y_i), with w(k) at infinity (Podkopaev and Ramdas, 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ffcp.batch import BatchOutput
from ffcp.conformal.by_label import checked_classes
from ffcp.conformal.calibration import Traits
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.conformal.weighted import LEARN, Reweighted


@dataclass(frozen=True)
class LabelShift(Reweighted):
    """Weights rows by how much more frequent their class is among new rows.

    Parameters
    ----------
    ratio : sequence of float or str, default="learn"
        A number for each class, its share among new rows over that among calibration rows, in
        the order of the model's outputs; or ``"learn"``: from what the model predicts for
        calibration rows set aside, whose labels are known, and for the inputs given as
        ``calibrate(x, y, new=...)``, which need no labels (Lipton, Wang and Smola, 2018).
    learned : sequence of float, default=None
        The ratios that were learned, of a calibration that a file holds.
    rows : dict of Tensor, default={}
        Scores and metadata of the calibration rows; filled by :meth:`fit`.

    Notes
    -----
    If the law of x given y is the same for both, sets contain the true label with probability at
    least 1 - alpha for new rows whose classes have this ratio. Learned ratios are estimates; the
    guarantee then holds for the learned ratio, not for the true one.

    Examples
    --------
    >>> labels = {"label": torch.tensor([0, 1, 0, 1])}
    >>> scores = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> LabelShift([1.0, 3.0]).fit(scores, labels).quantile(0.5)
    tensor([3., 4.], dtype=torch.float64)
    """

    ratio: Sequence[float] | str = LEARN
    learned: Sequence[float] | None = None
    traits = Traits(labels=True, missing=True)

    def __post_init__(self) -> None:
        if isinstance(self.ratio, str) and self.ratio != LEARN:
            raise ValueError(
                f"'ratio' must be a number for each class or {LEARN!r}, got {self.ratio!r}"
            )
        for ratios in (self.ratio, self.learned):
            if ratios is None or isinstance(ratios, str):
                continue
            are_ratios = all(0 <= ratio < math.inf for ratio in ratios) and any(ratios)
            if len(ratios) < 2 or not are_ratios:
                raise ValueError(
                    "'ratio' must be a number of at least 0 for each class, not all 0, got "
                    f"{list(ratios)!r}"
                )

    @property
    def ratios(self) -> Sequence[float] | None:
        """The ratio of each class; ``None`` until they are learned."""
        return self.learned if isinstance(self.ratio, str) else self.ratio

    def selection(self) -> Selection | None:
        """Return the selection that learns the shares of classes; ``None`` if they are given."""
        return None if self.ratios is not None else _ClassShares()

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Return the labels of rows, where they are known."""
        return {} if y is None else {"label": y.cpu().long()}

    def fit(self, scores: Tensor, metadata: Columns | None = None) -> LabelShift:
        """Return this calibration with these rows; ``metadata["label"]`` is the class of each."""
        filled = super().fit(scores, metadata)
        label = checked_classes(filled.rows["label"], filled.scores)
        if len(label) and int(label.max()) >= len(self.ratios or ()):
            raise ValueError(
                f"there are labels up to {int(label.max())}, but ratios for "
                f"{len(self.ratios or ())} classes: give one for each output of the model"
            )
        return filled

    @property
    def weights(self) -> Tensor:
        """The weight of every calibration row, (n,), the largest being 1."""
        return self._by_class[self.rows["label"]]

    @cached_property
    def _by_class(self) -> Tensor:
        """The ratio of each class, in units of the largest among the calibration rows."""
        ratio = torch.tensor(self.ratios, dtype=torch.float64)
        return ratio / (float(ratio[self.rows["label"]].max()) or 1.0)

    def quantile(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Return the threshold of each candidate label, (K,)."""
        return self.weighted_quantiles(self._by_class, alpha)[:, 0]

    def explain(self, alpha: Any, metadata: Columns) -> str:
        """Explain how much a row of a class weighs against all calibration rows."""
        return self.explain_weights(self._by_class, alpha, "rows of these classes")


class _ClassShares(Selection):
    """Learns the shares of classes on rows set aside and on unlabelled inputs."""

    what = "the shares of classes"
    takes_new = True

    def select(self, aside: Aside) -> Selected:
        """Return the calibration with the ratios that explain the model's predictions."""
        new = torch.cat([predicted_shares(out) for out in aside.target_inputs()])
        ratios = class_ratios(predicted_shares(aside.out), aside.y.cpu().long(), new)
        report = {"classes": {"rows": len(aside.y), "new_rows": len(new)}}
        return Selected(aside.score, replace(aside.calibration, learned=ratios), report)


def predicted_shares(out: BatchOutput) -> Tensor:
    """Return the model's class probabilities."""
    return out.output.detach().double().softmax(dim=1).cpu()


def class_ratios(predicted: Tensor, labels: Tensor, new: Tensor) -> tuple[float, ...]:
    """Return the ratios of class shares that turn old predictions into the new ones.

    With C[j, k] the mean prediction of class j over old rows of class k, times their share,
    and mu the mean prediction over new rows, C w = mu holds under label shift whatever the
    model. Ratios are regularised towards 1 according to the noise in mu, which matters for classes
    that hardly occur, and clipped at 0.

    Parameters
    ----------
    predicted, labels : Tensor
        What the model predicts for old rows, shares (n, K), and their classes.
    new : Tensor
        What it predicts for new rows, (b, K).

    Examples
    --------
    >>> sure = torch.eye(2, dtype=torch.float64)
    >>> old = torch.tensor([0] * 500 + [1] * 500)
    >>> new = torch.tensor([0] * 200 + [1] * 800)
    >>> [round(ratio, 2) for ratio in class_ratios(sure[old], old, sure[new])]
    [0.4, 1.6]
    """
    n, classes = predicted.shape
    if new.shape[1] != classes:
        raise ValueError(f"'new' has predictions of {new.shape[1]} classes, expected {classes}")
    mixed = torch.zeros(classes, classes, dtype=torch.float64)
    mixed.index_add_(0, labels, predicted.double())
    mixed = mixed.T / n
    moved = new.double().mean(dim=0) - mixed.sum(dim=1)
    noise = 1 / (min(n, len(new)) * classes)
    system = mixed.T @ mixed + noise * torch.eye(classes, dtype=torch.float64)
    ratio = 1 + torch.linalg.solve(system, mixed.T @ moved)
    return tuple(ratio.clamp_min(0).tolist())
