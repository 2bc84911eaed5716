"""Label shift: classes are more or less frequent than they were, and look as they did.

If new points have the ratio w to calibration points in the shares of their classes, and the law of
x given y is the same, the threshold of candidate label k is the 1 - alpha quantile of the scores
under weights w(y_i), with w(k) at infinity (Podkopaev and Ramdas, 2021).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ffcp import files
from ffcp.batch import BatchOutput
from ffcp.conformal.columns import Columns
from ffcp.conformal.random_numbers import Draws
from ffcp.conformal.weighted import LEARN, Reweighted
from ffcp.recipes import public


@public
class LabelShift(Reweighted):
    """Weights points by how much more frequent their class is among new points.

    Parameters
    ----------
    ratio
        A number for each class, its share among new points over that among calibration points, in
        the order of the model's outputs; or ``"learn"``: from what the model predicts for
        calibration rows set aside, whose labels are known, and for the inputs given as
        ``calibrate(x, y, new=...)``, which need no labels (Lipton, Wang and Smola, 2018).

    Notes
    -----
    Promised, if the law of x given y is the same for both: sets that hold the true label with
    probability at least 1 - alpha for new points whose classes have this very ratio. Learned
    ratios are estimates, and the promise is about what was learned.

    Examples
    --------
    >>> scores = LabelShift([1.0, 3.0])
    >>> noted = {"label": torch.tensor([0, 1, 0, 1])}
    >>> scores.add(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), noted)
    >>> scores.threshold(0.5)
    tensor([3., 4.], dtype=torch.float64)
    """

    label: Tensor
    what_is_open = "the shares of classes"
    looks_at_labels = True
    choice_name = "classes"
    most_rows = 10_000

    def __init__(self, ratio: Sequence[float] | str = LEARN) -> None:
        super().__init__()
        self.ratio: tuple[float, ...] | None = None
        if isinstance(ratio, str):
            if ratio != LEARN:
                raise ValueError(
                    f"ratio must be a number for each class or {LEARN!r}, got {ratio!r}"
                )
        else:
            self.ratio = _checked(ratio)
        self._is_learned = self.ratio is None
        self.new_inputs: Callable[[], Columns] | None = None
        self.register_buffer("label", torch.empty(0, dtype=torch.int64))

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """Whether the ratio is still to be learned."""
        return self.ratio is None

    @property
    def takes_new(self) -> bool:  # type: ignore[override]
        """Whether it learns from new inputs."""
        return self._is_learned

    def settings(self) -> dict[str, Any]:
        """Say what thresholds depend on besides the points."""
        ratio = None if self.ratio is None else list(self.ratio)
        learned = {"classes": None if ratio is None else len(ratio)} if self._is_learned else {}
        return {**super().settings(), "ratio": ratio, **learned}

    def metadata(self, out: BatchOutput, y: Tensor | None = None) -> dict[str, Any]:
        """Note the true label, where there is one, and the predicted shares if they teach."""
        noted: dict[str, Any] = {} if y is None else {"label": y.cpu().long()}
        if self.is_open:
            noted["predicted"] = out.output.detach().double().softmax(dim=1).cpu()
        return noted

    def with_target_inputs(self, new: Callable[[], Columns]) -> LabelShift:
        """Give a calibration that can learn the ratio; ``new`` notes new inputs when called."""
        fresh = self.empty()
        fresh.new_inputs = new
        return fresh

    def choose(
        self, scores: Tensor, metadata: Columns, planned: int, alpha: Any
    ) -> tuple[LabelShift, dict[str, Any]]:
        """Learn the shares of classes on points that do not calibrate, and on new inputs."""
        assert self.new_inputs is not None
        new = self.new_inputs()["predicted"]
        chosen = self.empty()
        chosen.ratio = class_ratios(metadata["predicted"], metadata["label"], new)
        chosen.new_inputs = None
        return chosen, {"rows": len(metadata["label"]), "new_rows": len(new)}

    def restored(self, settings: Mapping[str, Any]) -> LabelShift:
        """Take the learned ratio that was saved, if it is open here."""
        known, saved = self.empty(), settings.get("ratio")
        if self.ratio is None and saved is not None:
            known.ratio = _checked(files.rebuilt(tuple[float, ...], saved))
            if settings.get("classes") != len(known.ratio):
                raise ValueError("the learned ratio is of another number of classes")
        return known

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build what was said of the learned ratio again."""
        choice = saved.get("classes")
        return {} if choice is None else {"classes": files.rebuilt(dict[str, int], choice)}

    def add(self, scores: Tensor, metadata: Columns | None = None) -> None:
        """Keep these points; ``metadata["label"]`` is the class of each."""
        assert metadata is not None
        label = metadata["label"]
        if self.ratio is not None and len(label) and int(label.max()) >= len(self.ratio):
            raise ValueError(
                f"there are labels up to {int(label.max())}, but ratios for {len(self.ratio)} "
                "classes: give one for each output of the model"
            )
        super().add(scores, {"label": label})

    def check(self, points: Mapping[str, Tensor]) -> None:
        """Refuse labels without a ratio."""
        super().check(points)
        label, classes = points["label"], len(self.ratio or ())
        if label.dim() != 1 or not bool(((label >= 0) & (label < classes)).all()):
            raise ValueError("labels are not the numbers of classes that have a ratio")

    def weights(self) -> Tensor:
        """Give the weight of every calibration point, (n,), the largest being 1."""
        return self._by_class[self.label]

    @property
    def _by_class(self) -> Tensor:
        """The ratio of each class, in units of the largest among the calibration points."""
        ratio = torch.tensor(self.ratio or (1.0,), dtype=torch.float64)
        largest = float(ratio[self.label].max()) if len(self) else 0.0
        return ratio / (largest or 1.0)

    def threshold(
        self, alpha: Any, metadata: Columns | None = None, random: Draws | None = None
    ) -> Tensor:
        """Give the threshold of each candidate label, (K,)."""
        key, cache = ("classes", alpha), self._cache
        if key not in cache:
            cache[key] = self._thresholds(self._by_class, alpha)[:, 0]
        thresholds: Tensor = cache[key]
        return thresholds

    def why_infinite(self, alpha: Any, metadata: Columns) -> str:
        """Say how much a point of a class weighs against all calibration points."""
        return self._why_infinite(self._by_class, alpha, "points of these classes")


def class_ratios(predicted: Tensor, labels: Tensor, new: Tensor) -> tuple[float, ...]:
    """Solve for the ratios of class shares that turn old predictions into the new ones.

    With C[j, k] the mean prediction of class j over old points of class k, times their share,
    and mu the mean prediction over new points, C w = mu holds under label shift whatever the
    model. Ratios are pulled to 1 by as much as the noise in mu calls for, which settles classes
    that hardly occur, and cut off at 0.

    Parameters
    ----------
    predicted, labels
        What the model predicts for old points, shares (n, K), and their classes.
    new
        What it predicts for new points, (b, K).

    Examples
    --------
    >>> sure = torch.eye(2, dtype=torch.float64)
    >>> old = torch.tensor([0] * 500 + [1] * 500)
    >>> new = torch.tensor([0] * 200 + [1] * 800)
    >>> [round(ratio, 2) for ratio in class_ratios(sure[old], old, sure[new])]
    [0.4, 1.6]
    """
    n, classes = predicted.shape
    mixed = torch.zeros(classes, classes, dtype=torch.float64)
    mixed.index_add_(0, labels, predicted.double())
    mixed = mixed.T / n
    moved = new.double().mean(dim=0) - mixed.sum(dim=1)
    noise = 1 / (min(n, len(new)) * classes)
    system = mixed.T @ mixed + noise * torch.eye(classes, dtype=torch.float64)
    ratio = 1 + torch.linalg.solve(system, mixed.T @ moved)
    return tuple(ratio.clamp_min(0).tolist())


def _checked(ratio: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(one) for one in ratio)
    if len(values) < 2 or not all(0 <= one < math.inf for one in values) or not any(values):
        raise ValueError(
            f"ratio must be a number of at least 0 for each class, not all 0, got {list(ratio)!r}"
        )
    return values
