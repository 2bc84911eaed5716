"""Label sets for classifiers: LAC, APS, RAPS and FFRAPS on a model that returns logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ffcp import files, sets, tuning
from ffcp.calibrated import Calibrated
from ffcp.conformal.rank import conformal_rank, exact_alpha, points_needed
from ffcp.errors import FFCPWarning
from ffcp.network import inputs, passes
from ffcp.network.features import OUTPUT, resolve
from ffcp.pieces import Needs
from ffcp.quantiles import ScoreBuffer, ScoreStore
from ffcp.sets import FEATURE, SOFTMAX, Cumulative, LabelSet, Rows, Score, Threshold
from ffcp.tuning import SetChoice, Tuner

FIT = "fit"
# Streams of random numbers. Not 0: numpy takes [seed, 0] for seed, which divides the rows.
_CALIBRATION, _PREDICTION = 1, 2
_DEFAULTS = {"lam": 0.01, "kreg": 5, "delta": 0.01}
Self = TypeVar("Self", bound="SetPredictor")


class ClassScores(ScoreStore):
    """Calibration scores with their labels, for a threshold of each class.

    The two columns of ``scores`` are label and score; rows are sorted by both. A class is a
    number here, and may have no point at all: thousands of classes cost no more than a few.

    >>> store = ClassScores()
    >>> store.replace(torch.tensor([[1, 0.5], [0, 0.7], [1, 0.3]]))
    >>> store.thresholds(0.5, classes=3)
    tensor([0.7000, 0.5000,    inf], dtype=torch.float64)
    """

    def replace(self, scores: Tensor, labels: Any = None) -> None:
        """Keep these labels and scores, of shape (n, 2), and no others."""
        kept = scores.detach().to("cpu", torch.float64)
        order = np.lexsort((kept[:, 1].numpy(), kept[:, 0].numpy()))
        self.scores = kept[torch.from_numpy(order)]

    def thresholds(self, alpha: Any, classes: int) -> Tensor:
        """Look up the conformal quantile of each class; infinite where it has too few scores."""
        labels, scores = self.scores.unbind(dim=1)
        counts = torch.bincount(labels.long(), minlength=classes)
        kinds, which = counts.unique(return_inverse=True)
        ranks = torch.tensor([conformal_rank(n, alpha) for n in kinds.tolist()])[which]
        enough = ranks <= counts
        index = counts.cumsum(0) - counts + ranks - 1
        found = torch.full((classes,), torch.inf, dtype=torch.float64)
        found[enough] = scores[index[enough]]
        return found


@dataclass(frozen=True)
class _Calibrated:
    """All that a calibration finds; taken over at once, when nothing can fail any more."""

    entries: Tensor
    score: Score
    choice: SetChoice | None
    classes: int
    drawn: int


class SetPredictor(Calibrated):
    """What all label-set methods share: calibrate, score, predict, merge and save.

    A method says which settings its score has (``given``: name to value, ``None`` for those to
    be tuned) and how they make a score (:meth:`_make`). The model runs in eval mode and is left
    as it was found.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Mapping[str, Any],
        *,
        tune: str | None = None,
        tune_fraction: float = 0.2,
        tune_alpha: float = 0.1,
        seed: int = 0,
        randomized: bool = False,
        allow_zero_sets: bool = False,
        class_conditional: bool = False,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(model, batch_size)
        if not 0 < tune_fraction < 1:
            raise ValueError(f"tune_fraction must lie between 0 and 1, got {tune_fraction}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be an integer and not negative, got {seed!r}")
        exact_alpha(tune_alpha)
        self.tune = tune
        self.tune_fraction = tune_fraction
        self.tune_alpha = tune_alpha
        self.seed = seed
        self.randomized = randomized
        self.allow_zero_sets = allow_zero_sets
        self.class_conditional = class_conditional
        self.feature: str | None = None
        self.choice: SetChoice | None = None
        self.classes: int | None = None
        if class_conditional:
            self.calibration = ClassScores()
        self._given = self._checked(given)
        self._drawn: dict[int, int] = {}  # by seed, how many random numbers are used up
        self._score: Score | None = None if self._open() else self._make(self._given)

    # -- what a method defines ------------------------------------------------------------

    def _make(self, settings: Mapping[str, Any]) -> Score:
        """Build the score from settings that are all known."""
        return Cumulative(**settings)

    # -- settings -------------------------------------------------------------------------

    def _checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in defaults where nothing is tuned, and refuse values out of range."""
        if self.tune not in (None, tuning.SIZE, tuning.COVERAGE):
            raise ValueError(
                f"tune must be None, {tuning.SIZE!r} or {tuning.COVERAGE!r}, got {self.tune!r}"
            )
        if isinstance(given["temperature"], str | None) and given["temperature"] != FIT:
            raise ValueError(
                f"temperature must be a positive number or {FIT!r}, got {given['temperature']!r}"
            )
        # Plain numbers: they are saved as JSON.
        filled = {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}
        missing = {key: _DEFAULTS[key] for key, value in given.items() if value is None}
        if self.tune and not missing:
            raise ValueError(
                f"tune={self.tune!r} has nothing to tune: leave out those of "
                f"{', '.join(key for key in given if key in _DEFAULTS)} that are to be chosen"
            )
        if not self.tune:
            filled.update(missing)
        fitted = {"temperature": 1.0} if filled["temperature"] == FIT else {}
        self._make({**filled, **missing, **fitted})  # which raises for values out of range
        return filled

    def _open(self) -> list[str]:
        """Name the settings that calibration is to choose."""
        return [key for key, value in self._given.items() if value is None or value == FIT]

    def _setting(self, name: str) -> Any:
        return getattr(self._score, name, None)

    @property
    def temperature(self) -> float | None:
        """What logits are divided by; ``None`` until it is fitted."""
        return None if self._score is None else self._score.temperature

    def _settings(self) -> dict[str, Any]:
        values = dict.fromkeys(self._given) if self._score is None else asdict(self._score)
        return {
            **super()._settings(),
            **{key: values[key] for key in self._given},
            "feature": self.feature,
            "randomized": self.randomized,
            "class_conditional": self.class_conditional,
        }

    # -- calibrating ----------------------------------------------------------------------

    def calibrate(self: Self, x: Any, y: Any = None, *, update: bool = False) -> Self:
        """Score the true labels of held-out points; every later set rests on these scores.

        Parameters
        ----------
        x, y
            Inputs and labels, as tensors or arrays; or ``x`` alone, a loader that yields pairs
            ``(x, y)``. Labels are integers from 0. The points must not have trained the model.
        update
            Add to the scores there are instead of replacing them. What was tuned stays.

        Returns
        -------
        self
            Unchanged if anything goes wrong on the way.
        """
        with torch.inference_mode(False):  # the scores outlive the caller's inference_mode
            found = self._run_calibration(x, y, update)
            if update:
                self.calibration.add(found.entries)
            else:
                self.calibration.replace(found.entries)
        self._score, self.classes = found.score, found.classes
        self._drawn = {**(self._drawn if update else {}), self.seed: found.drawn}
        self.choice = found.choice or (self.choice if update else None)
        return self

    def _run_calibration(self, x: Any, y: Any, update: bool) -> _Calibrated:
        score = self._score if update or not self._open() else None
        tuner = Tuner(self.tune_fraction, self.seed) if score is None else None
        choice, classes = None, self.classes if update else None
        start = drawn = self._drawn.get(self.seed, 0) if update else 0
        buffer = ScoreBuffer()
        for rows, labels in self._labelled_rows(x, y, start, classes):
            classes, drawn = rows.logits.shape[1], drawn + len(labels)
            if score is None and tuner is not None:
                tuner.add(rows, labels)
                if not tuner.enough:
                    continue
                score, choice, rows, labels = self._choose(tuner)
            assert score is not None
            buffer.extend(self._entries(score, rows, labels))
        if classes is None or drawn == start:
            raise ValueError("the calibration data is empty: there are no rows to score")
        if score is None and tuner is not None:
            score, choice, rows, labels = self._choose(tuner)
            buffer.extend(self._entries(score, rows, labels))
        assert score is not None
        return _Calibrated(buffer.scores, score, choice, classes, drawn)

    def _labelled_rows(
        self, x: Any, y: Any, drawn: int, classes: int | None
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Yield batches of checked rows and labels; ``drawn`` random numbers are used up."""
        row = 0
        for whole, target in inputs.pairs(x, y, self.model):
            start = 0
            for batch in inputs.batches(whole, self.batch_size) if len(target) else ():
                if not row:
                    passes.check_rows(self.model, batch, self._features())
                rows = self._rows(batch, row, _CALIBRATION, drawn + row)
                if not row:
                    _refuse_probabilities(rows.logits)
                count = len(rows.logits)
                classes = self._same_classes(rows.logits, classes)
                labels = _labels(target[start : start + count], target.shape, classes, row)
                yield rows, labels.to(rows.logits.device)
                start, row = start + count, row + count

    def _choose(self, tuner: Tuner) -> tuple[Score, SetChoice, Rows, Tensor]:
        """Fit and tune what is open; return the rows that are to calibrate as well."""
        (rows, labels), (rest, rest_labels) = tuner.finish()
        settings = dict(self._given)
        if settings["temperature"] == FIT:
            settings["temperature"] = tuning.fit_temperature(rows.logits, labels)
        if self.tune:
            choice = self._tuned(settings, rows, labels)
            settings.update(kreg=choice.kreg, lam=choice.lam)
            if "delta" in settings:
                settings["delta"] = choice.delta
        else:
            kept = {key: settings.get(key) for key in ("kreg", "lam", "delta")}
            choice = SetChoice(
                settings["temperature"], **kept, rows=len(labels), alpha=float(self.tune_alpha),
                criterion=None, candidates=(),
            )  # fmt: skip
        return self._make(settings), choice, rest, rest_labels

    def _tuned(self, settings: Mapping[str, Any], rows: Rows, labels: Tensor) -> SetChoice:
        assert self.tune is not None
        lam, delta = settings["lam"], settings.get("delta", 0.0)
        return tuning.tune(
            rows,
            labels,
            Cumulative(settings["temperature"], gradient=settings.get("gradient", SOFTMAX)),
            kreg=settings["kreg"],
            lams=tuning.LAMS[self.tune] if lam is None else (lam,),
            deltas=tuning.DELTAS if delta is None else (delta,),
            criterion=self.tune,
            alpha=self.tune_alpha,
            allow_empty=self.allow_zero_sets,
        )

    def _entries(self, score: Score, rows: Rows, labels: Tensor) -> Tensor:
        """Make what the store keeps of calibration rows: scores, with labels if they matter."""
        scores = sets.label_scores(score, rows, labels)
        columns = [labels.double(), scores] if self.class_conditional else [scores]
        return torch.stack(columns, dim=1).cpu()

    # -- running the model ----------------------------------------------------------------

    def _features(self) -> list[str]:
        return [] if self.feature is None else [self.feature]

    def _rows(self, batch: Any, row: int, stream: int, random_row: int) -> Rows:
        """Run the model on one batch; ``row`` is the number that errors give to its first row."""
        if self.feature is None:
            logits, _ = passes.run(
                self.model, batch, [], batch_size=inputs.row_count(batch), first_row=row
            )
            norms = None
        else:
            logits, norms = run_with_norms(self.model, batch, self.feature, row)
        _check_logits(logits)
        if self.randomized:
            share = sets.uniforms(self.seed, stream, random_row, len(logits))
        else:
            share = torch.ones(len(logits), dtype=torch.float64)
        return Rows(logits, share.to(logits.device), norms)

    def _new_rows(self, x: Any, first_row: int) -> Iterator[Rows]:
        """Yield batches of rows to predict."""
        row = 0
        for batch in inputs.batches(x, self.batch_size):
            rows = self._rows(batch, row, _PREDICTION, first_row + row)
            self._same_classes(rows.logits, self.classes)
            yield rows
            row += len(rows.logits)

    def _same_classes(self, logits: Tensor, classes: int | None) -> int:
        if classes is not None and logits.shape[1] != classes:
            raise ValueError(
                f"calibrated on {classes} classes, but the model now gives {logits.shape[1]}"
            )
        return logits.shape[1]

    # -- using the calibration ------------------------------------------------------------

    def predict_set(self, x: Any, alpha: Any = 0.1, *, first_row: int = 0) -> LabelSet:
        """Give sets of labels that hold the true one with probability at least 1 - alpha.

        Parameters
        ----------
        x
            Inputs, as the model takes them.
        alpha
            Share of misses allowed, in (0, 1). Any value, without calibrating again.
        first_row
            The number of the first row of ``x`` in a stream that is predicted piece by piece.
            Each row number has its own random number; without counting on, a randomised
            method would use the same few for every piece.

        Returns
        -------
        LabelSet
            The mask of labels, their number and, on request, the labels in order.
        """
        exact = exact_alpha(alpha)
        self._must_be_calibrated()
        score, threshold = self._ready(), self._threshold(exact)
        x = self._checked_input(x, first_row)
        buffer = inputs.RowBuffer(inputs.row_count(x))
        for rows in self._new_rows(x, first_row):
            mask = sets.label_mask(score, rows, threshold, allow_empty=self.allow_zero_sets)
            buffer.add({"mask": mask})
        return LabelSet(buffer["mask"], partial(self._weights, score, x))

    def _weights(self, score: Score, x: Any) -> Iterator[Tensor]:
        for rows in self._new_rows(x, 0):
            for block in sets.blocks(*rows.logits.shape):
                yield score.weights(rows.logits[block])

    def score(self, x: Any, y: Any, *, first_row: int = 0) -> Tensor:
        """Return the scores of one label per row, shape (n,), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration.
        """
        score = self._ready()
        if y is None:
            raise TypeError("score(x, y) needs the labels y")
        ((x, y),) = inputs.pairs(x, y, self.model)
        buffer, start = inputs.RowBuffer(len(y)), 0
        for rows in self._new_rows(self._checked_input(x, first_row), first_row):
            part = y[start : start + len(rows.logits)]
            labels = _labels(part, y.shape, rows.logits.shape[1], start).to(rows.logits.device)
            buffer.add({"scores": sets.label_scores(score, rows, labels)})
            start += len(part)
        return buffer["scores"]

    def score_all(self, x: Any, *, first_row: int = 0) -> Tensor:
        """Return the scores of every label, shape (n, K), in float64.

        Random numbers are those of :meth:`predict_set`, not of the calibration.
        """
        score, x = self._ready(), self._checked_input(x, first_row)
        buffer = inputs.RowBuffer(inputs.row_count(x))
        for rows in self._new_rows(x, first_row):
            buffer.add({"scores": sets.all_scores(score, rows)})
        return buffer["scores"]

    def _checked_input(self, x: Any, first_row: int) -> Any:
        if first_row < 0:
            raise ValueError(f"first_row counts from 0, got {first_row}")
        x = inputs.to_tensors(x, self.model)
        if not inputs.row_count(x):
            raise ValueError("x has no rows")
        return x

    def _ready(self) -> Score:
        if self._score is None:
            raise RuntimeError(
                f"{', '.join(self._open())} not chosen yet: call calibrate(x, y) first, or give "
                "values"
            )
        return self._score

    def _threshold(self, alpha: Any) -> Tensor:
        """Look up the threshold, or one for each class; warn where it is infinite."""
        store, needed = self.calibration, points_needed(alpha)
        if isinstance(store, ClassScores):
            assert self.classes is not None
            found = store.thresholds(alpha, self.classes)
            without = int(found.isinf().sum())
            if without:
                warnings.warn(
                    f"{without} of {self.classes} classes are in every set: alpha={float(alpha):g} "
                    f"needs at least {needed} calibration points of each class",
                    FFCPWarning,
                    stacklevel=3,
                )
            return found
        k = conformal_rank(len(store), alpha)
        if k <= len(store):
            return store.scores[k - 1, 0]
        warnings.warn(
            f"every set holds all labels: alpha={float(alpha):g} needs at least {needed} "
            f"calibration points and there are {len(store)}",
            FFCPWarning,
            stacklevel=3,
        )
        return torch.tensor(torch.inf, dtype=torch.float64)

    # -- sharing the calibration ----------------------------------------------------------

    def merge(self: Self, other: SetPredictor) -> Self:
        """Add the scores of another predictor of the same model, calibrated on other points.

        So calibration can be divided over workers and put together here. Workers of a
        randomised method need a seed each.
        """
        if not isinstance(other, SetPredictor):
            raise TypeError(f"cannot merge a {type(other).__name__}")
        if other is self:
            raise ValueError("a predictor cannot be merged with itself: points would count twice")
        self._must_match(other._settings(), "the predictor to merge")
        if not len(other.calibration):
            raise ValueError("the predictor to merge has no calibration")
        shared = sorted(self._drawn.keys() & other._drawn.keys())
        if self.randomized and shared:
            raise ValueError(
                f"both predictors drew their random numbers with seed {shared[0]}, so their "
                "points share them: give each worker its own seed"
            )
        if self.classes not in (None, other.classes):
            raise ValueError(
                f"calibrated on {self.classes} classes, the predictor to merge on {other.classes}"
            )
        self.calibration.add(other.calibration.scores)
        self.classes, self._drawn = other.classes, {**self._drawn, **other._drawn}
        return self

    def _remembered(self) -> dict[str, Any]:
        return {
            "choice": None if self.choice is None else asdict(self.choice),
            "classes": self.classes,
            "drawn": list(self._drawn.items()),
        }

    def set_extra_state(self, state: Tensor) -> None:
        """Take over the choice that was saved; check all other settings."""
        saved, before = files.unpack(state), self._score
        if self._open():
            # Only what is left open here may come from there.
            known = {**self._given, **{key: saved.get(key) for key in self._open()}}
            self._score = None if None in known.values() else self._make(known)
        try:
            super().set_extra_state(state)
        except ValueError:
            self._score = before
            raise
        self.choice = None if saved["choice"] is None else tuning.choice_from(saved["choice"])
        self.classes, self._drawn = saved["classes"], dict(saved["drawn"])


class LAC(SetPredictor):
    """Least ambiguous sets: all labels of at least a certain probability (Sadinle et al., 2019).

    Sets are the smallest on average, but rows that are hard are covered too rarely.

    Parameters
    ----------
    model
        A trained network; forward returns logits of shape (n, K).
    temperature
        What logits are divided by; ``"fit"`` chooses it by likelihood on rows that then do
        not calibrate.
    allow_zero_sets
        Otherwise an empty set gets the most probable label.
    class_conditional
        Calibrate each class on its own, so that each is covered with probability 1 - alpha.
        Classes with too few points are in every set.
    tune_fraction, seed
        The share of rows set aside for ``temperature="fit"``, and the seed of the division.
    batch_size
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> found = LAC(model).calibrate(x[:100], y[:100]).predict_set(x[100:], alpha=0.1)
    >>> found.mask.shape
    torch.Size([100, 3])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float | str = 1.0,
        allow_zero_sets: bool = False,
        class_conditional: bool = False,
        tune_fraction: float = 0.2,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(
            model,
            {"temperature": temperature},
            allow_zero_sets=allow_zero_sets,
            class_conditional=class_conditional,
            tune_fraction=tune_fraction,
            seed=seed,
            batch_size=batch_size,
        )

    def _make(self, settings: Mapping[str, Any]) -> Score:
        return Threshold(**settings)


class APS(SetPredictor):
    """Adaptive prediction sets: labels in order until their probabilities suffice (Romano, 2020).

    Parameters
    ----------
    model, temperature, allow_zero_sets, class_conditional, tune_fraction, batch_size
        As in :class:`LAC`.
    randomized
        Count only a random share of the last label's probability. Sets are then as small as
        coverage of 1 - alpha permits; without it they cover more.
    seed
        Seed of the random shares and of the division of rows. Row i of an input has the same
        share in every batch size and on every device.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> found = APS(model).calibrate(x[:100], y[:100]).predict_set(x[100:], alpha=0.1)
    >>> found.coverage(y[100:]) > 0.8
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float | str = 1.0,
        randomized: bool = True,
        allow_zero_sets: bool = False,
        class_conditional: bool = False,
        tune_fraction: float = 0.2,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(
            model,
            {"temperature": temperature},
            randomized=randomized,
            allow_zero_sets=allow_zero_sets,
            class_conditional=class_conditional,
            tune_fraction=tune_fraction,
            seed=seed,
            batch_size=batch_size,
        )


class RAPS(SetPredictor):
    """Regularised adaptive prediction sets: APS with a price on ranks (Angelopoulos, 2021).

    The score of the label at rank r grows by ``lam * max(r - kreg, 0)``, which keeps the long
    tail of improbable labels out.

    Parameters
    ----------
    model, temperature, allow_zero_sets, class_conditional, batch_size
        As in :class:`LAC`.
    randomized, seed
        As in :class:`APS`.
    lam, kreg
        Price of a rank, and how many ranks are free. What is left out is chosen by ``tune``,
        and without ``tune`` is 0.01 and 5.
    tune
        ``"size"`` chooses what is left out for small sets, ``"coverage"`` for the smallest
        size-stratified coverage violation, on rows that then do not calibrate. A fifth of them,
        at most 10,000; until they are together, the logits of the others wait in memory.
        Settings are compared by one threshold for all, also if ``class_conditional``.
    tune_fraction, tune_alpha
        The share of rows that tune, and the level at which settings are compared.

    Attributes
    ----------
    choice : SetChoice or None
        What tuning saw and took.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Linear(4, 10), torch.randn(600, 4)
    >>> y = torch.distributions.Categorical(logits=model(x)).sample()
    >>> predictor = RAPS(model, tune="size").calibrate(x[:500], y[:500])
    >>> predictor.choice.rows
    100
    >>> found = predictor.predict_set(x[500:], alpha=0.1)
    >>> len(found.labels[0]) == found.sizes[0]
    tensor(True)
    """

    def __init__(
        self,
        model: nn.Module,
        lam: float | None = None,
        kreg: int | None = None,
        *,
        temperature: float | str = 1.0,
        tune: str | None = None,
        tune_fraction: float = 0.2,
        tune_alpha: float = 0.1,
        randomized: bool = True,
        allow_zero_sets: bool = False,
        class_conditional: bool = False,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(
            model,
            {"temperature": temperature, "lam": lam, "kreg": kreg},
            tune=tune,
            tune_fraction=tune_fraction,
            tune_alpha=tune_alpha,
            randomized=randomized,
            allow_zero_sets=allow_zero_sets,
            class_conditional=class_conditional,
            seed=seed,
            batch_size=batch_size,
        )

    @property
    def lam(self) -> float | None:
        """Price of a rank; ``None`` until it is chosen."""
        value: float | None = self._setting("lam")
        return value

    @property
    def kreg(self) -> int | None:
        """How many ranks are free; ``None`` until it is chosen."""
        value: int | None = self._setting("kreg")
        return value


class FFRAPS(RAPS):
    """RAPS with the size of the network's gradient in the score (the paper's FFRAPS).

    With ``delta=0`` it is RAPS, to the last bit.

    Parameters
    ----------
    model, lam, kreg and all others
        As in :class:`RAPS`. ``delta`` left out is chosen by ``tune``, and without it is 0.01.
    delta
        Weight of the gradient.
    gradient
        ``"softmax"``, as in the published code: the probability of label j grows by delta times
        the norm of its gradient in the logits, p_j sqrt(1 - 2 p_j + sum p^2) / temperature,
        before labels are sorted and summed. No backward pass.

        ``"feature"``, as in the paper's algorithm: the score of all labels of a row grows by
        delta times the norm of the gradient of the top label's probability at ``feature``. One
        backward pass through the layers behind it. The probability is that of the model
        itself, at temperature 1.
    feature
        For ``gradient="feature"``: a dotted module name, a module, or ``"input"``.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))  # yours is trained
    >>> x, y = torch.randn(200, 4), torch.randint(0, 10, (200,))
    >>> predictor = FFRAPS(model, gradient="feature", feature="0").calibrate(x[:100], y[:100])
    >>> predictor.predict_set(x[100:], alpha=0.1).sizes.shape
    torch.Size([100])
    """

    def __init__(
        self,
        model: nn.Module,
        delta: float | None = None,
        lam: float | None = None,
        kreg: int | None = None,
        gradient: str = SOFTMAX,
        feature: str | nn.Module | None = None,
        *,
        temperature: float | str = 1.0,
        tune: str | None = None,
        tune_fraction: float = 0.2,
        tune_alpha: float = 0.1,
        randomized: bool = True,
        allow_zero_sets: bool = False,
        class_conditional: bool = False,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> None:
        SetPredictor.__init__(
            self,
            model,
            {
                "temperature": temperature,
                "lam": lam,
                "kreg": kreg,
                "delta": delta,
                "gradient": gradient,
            },
            tune=tune,
            tune_fraction=tune_fraction,
            tune_alpha=tune_alpha,
            randomized=randomized,
            allow_zero_sets=allow_zero_sets,
            class_conditional=class_conditional,
            seed=seed,
            batch_size=batch_size,
        )
        self.gradient = gradient
        self.feature = _gradient_feature(model, gradient, feature)

    @property
    def delta(self) -> float | None:
        """Weight of the gradient; ``None`` until it is chosen."""
        value: float | None = self._setting("delta")
        return value


def _gradient_feature(
    model: nn.Module, gradient: str, feature: str | nn.Module | None
) -> str | None:
    if gradient == SOFTMAX:
        if feature is not None:
            raise ValueError(
                f"feature={feature!r} has no part in gradient={SOFTMAX!r}, which is taken in the "
                f"logits: leave it out, or use gradient={FEATURE!r}"
            )
        return None
    if feature is None:
        raise ValueError(
            f"gradient={FEATURE!r} needs a layer: give feature=, a dotted module name, a module "
            "or 'input'"
        )
    name = resolve(model, feature)
    if name == OUTPUT:
        raise ValueError(
            f"gradient={FEATURE!r} needs a layer before the output: in the logits themselves use "
            f"gradient={SOFTMAX!r}"
        )
    return name


def run_with_norms(model: nn.Module, x: Any, feature: str, first_row: int) -> tuple[Tensor, Tensor]:
    """Run one batch; return logits and the gradient norm of the top label's probability."""
    needs = Needs(norms=(feature,), of=_top_probability)
    seen = passes.see(model, x, needs, first_row)
    return seen.output, seen.norms[feature]


def _top_probability(logits: Tensor) -> Tensor:
    _check_logits(logits)
    return logits.double().softmax(dim=1).amax(dim=1)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2:
        raise ValueError(
            f"the model's output has shape {tuple(logits.shape)}; label sets need logits of shape "
            "(n, K), one for each of K classes"
        )
    if logits.shape[1] < 2:
        raise ValueError(
            "the model gives one class only; a set needs at least two. For a binary classifier "
            "with one logit z return torch.cat([0 * z, z], dim=1)"
        )


def _refuse_probabilities(logits: Tensor) -> None:
    """Refuse what is nonnegative and sums to 1 in every row: a softmax of it is not meant."""
    tolerance = max(1e-4, torch.finfo(logits.dtype).eps)
    if bool((logits >= 0).all() and ((logits.double().sum(dim=1) - 1).abs() <= tolerance).all()):
        raise ValueError(
            "the model's output looks like probabilities: all rows are nonnegative and sum to 1. "
            "Label sets start from logits: return them before the softmax, or torch.log of the "
            "probabilities"
        )


def _labels(y: Tensor, shape: torch.Size, classes: int, first_row: int) -> Tensor:
    """Check class labels, a part of a target of the given shape."""
    if len(shape) != 1:
        hint = ": for one-hot rows use y.argmax(dim=1)" if shape[-1] == classes else ""
        raise ValueError(
            f"labels have shape {tuple(shape)}, expected one integer per row: {(shape[0],)}{hint}"
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise TypeError(
            f"labels must be integers, the numbers of classes from 0, got {y.dtype}: "
            "convert them, for example with y.long()"
        )
    y = y.long()
    outside = (y < 0) | (y >= classes)
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise ValueError(
            f"label {int(y[row])} in row {first_row + row} is out of range: the model has "
            f"{classes} classes, so labels go from 0 to {classes - 1}"
        )
    return y
