"""Selection of the label score, LAC, APS or RAPS, on rows that are not used for calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ffcp.batch import Requires
from ffcp.classification import rules, tuning
from ffcp.classification.rules import Cumulative, LabelRows, Threshold
from ffcp.classification.scores import APS, LAC, RAPS, RuleScore, as_score, known_rows
from ffcp.conformal.rank import exact_alpha, plain_quantile
from ffcp.conformal.selection import Aside, Selected, Selection
from ffcp.description import Described
from ffcp.notebooks import Ranking, ShownAsTable

AUTO = "auto"
_FEWEST = 20  # with fewer rows set aside, mean sizes are too uncertain


@dataclass(frozen=True)
class ScoreChoice(ShownAsTable, Described):
    """The selected label score, and the mean set sizes of all candidates.

    Attributes
    ----------
    score : str
        The selected score, with its settings.
    trials : dict
        The mean set size of each candidate on the rows set aside. The smallest is selected if its
        sets are smaller than those of plain LAC by more than a standard error.
    rows : int
        How many rows were set aside for the selection and not calibrated on; 0 if there were too
        few.
    alpha : float
        The level at which candidates were compared.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> model, x = torch.nn.Linear(4, 9), 3 * torch.randn(500, 4)  # yours is trained
    >>> y = model(x).softmax(dim=1).multinomial(1)[:, 0]
    >>> choice = ffcp.SetPredictor(model, "auto", seed=0).calibrate(x, y).choice
    >>> choice.rows, sorted({name.split(",")[0] for name in choice.trials})
    (100, ['APS', 'LAC', 'RAPS'])
    """

    score: str
    trials: Mapping[str, float]
    rows: int
    alpha: float

    def ranking(self) -> Ranking:
        """Return the candidates, the best first; of those that differ in a penalty the best one."""
        if not self.rows:
            few = f"not selected: fewer than {_FEWEST} rows could be set aside"
            return Ranking([f"{_explained(self.score)}; {few}"], (), (), 0)
        best = {_explained(self.score): self.trials[self.score]}
        for name, size in sorted(self.trials.items(), key=lambda trial: trial[1]):
            best.setdefault(_explained(name), size)
        ranked = sorted(best, key=lambda name: best[name])
        by = f"chosen by mean size of sets on {self.rows:,} rows at alpha = {self.alpha:g}"
        chosen = ranked.index(_explained(self.score))
        below = "> marks the chosen one."
        if chosen > 0:
            below += (
                " Sets above it are smaller by less than chance explains, a standard error over "
                "these rows; then the simplest is taken."
            )
        rows = [(name, f"{best[name]:.4g}") for name in ranked]
        above = [f"{_explained(self.score)}, {by}"]
        return Ranking(above, ("labels in a set", "mean size"), rows, chosen, [below])


@dataclass(frozen=True)
class LabelScoreSelection(Selection):
    """Selects the label score with the smallest sets: LAC, APS or RAPS."""

    allow_empty: bool = False
    other_labels: bool = False
    what = "the label score"
    is_optional = True
    fewest_rows = _FEWEST
    draws = randomized = takes_logits = True

    def requires(self) -> Requires:
        """Return the required features: two logits, also of a model that returns one."""
        return Requires(logits=True)

    def accepts(self, score: Any) -> bool:
        """Whether a score is one of the candidates."""
        is_candidate = isinstance(score, RuleScore) and score.name in (LAC, APS, RAPS)
        return is_candidate and score.other_labels == self.other_labels

    def without_rows(self, rows: int, alpha: Any) -> Selected:
        """Return LAC, as there are too few rows for a selection."""
        choice = ScoreChoice(_label(Threshold()), {}, 0, float(exact_alpha(alpha)))
        why = (
            f"LAC is used: {rows} rows are too few to set some aside for selecting the label "
            "score. Pass more rows, or name the score"
        )
        return Selected(self._score_of(Threshold()), None, {"score": choice}, why)

    def select(self, aside: Aside) -> Selected:
        """Return the candidate with the smallest sets on the rows set aside."""
        rows, labels, level = known_rows(self._score_of(Cumulative()), aside)
        sizes = dict(self._trials(rows, labels, level))
        plain = next(iter(sizes))  # LAC at temperature 1
        best = min(sizes, key=lambda rule: sizes[rule])
        # The minimum of many is biased: without a significant difference plain LAC is selected.
        gain = self._sizes(plain, rows, labels, level) - self._sizes(best, rows, labels, level)
        chosen = best if gain.mean() > gain.std() / len(gain) ** 0.5 else plain
        trials = {_label(rule): size for rule, size in sizes.items()}
        choice = ScoreChoice(_label(chosen), trials, len(aside.y), float(exact_alpha(aside.alpha)))
        return Selected(self._score_of(chosen), aside.calibration, {"score": choice})

    def _score_of(self, rule: Threshold | Cumulative) -> RuleScore:
        """Return the score of a candidate."""
        name, penalties = _name(rule), {}
        if isinstance(rule, Cumulative) and name == RAPS:
            penalties = {"lam": rule.lam, "kreg": rule.kreg}
        options = {"randomized": name != LAC, "other_labels": self.other_labels}
        return RuleScore(name, rule.temperature, **penalties, **options)  # type: ignore[arg-type]

    def _trials(
        self, rows: LabelRows, labels: Tensor, alpha: Any
    ) -> Iterator[tuple[Threshold | Cumulative, float]]:
        """Yield each candidate with its mean set size."""
        fitted = tuning.fit_temperature(rows.logits, labels)
        for temperature in (1.0, fitted):
            lac = Threshold(temperature)
            yield lac, float(self._sizes(lac, rows, labels, alpha).mean())
            tuned = tuning.tune(
                rows, labels, Cumulative(temperature), kreg=None,
                lams=(0.0, *tuning.LAMS[tuning.SIZE]), deltas=(0.0,), criterion=tuning.SIZE,
                alpha=alpha, allow_empty=self.allow_empty, randomized=True,
            )  # fmt: skip
            for candidate in tuned.candidates:
                rule = Cumulative(temperature, lam=candidate.lam, kreg=candidate.kreg)
                yield rule, candidate.mean_size

    def _sizes(
        self, rule: Threshold | Cumulative, rows: LabelRows, labels: Tensor, alpha: Any
    ) -> Tensor:
        """Return the set size of each row."""
        threshold = plain_quantile(rules.label_scores(rule, rows, labels)[:, None], alpha)[0]
        mask = rules.label_mask(rule, rows, threshold, allow_empty=self.allow_empty)
        return mask.sum(dim=1).double()


def score_of(score: Any, allow_empty: bool) -> Any:
    """Return a label score, from a score or a function; a selection for ``"auto"``."""
    is_auto = isinstance(score, str) and score == AUTO
    return LabelScoreSelection(allow_empty) if is_auto else as_score(score)


def _name(rule: Threshold | Cumulative) -> str:
    if isinstance(rule, Threshold):
        return LAC
    return RAPS if rule.lam else APS


def _label(rule: Threshold | Cumulative) -> str:
    """Return the name of a candidate with its settings.

    >>> _label(Cumulative(1.25, lam=0.1, kreg=2)), _label(Threshold())
    ('RAPS, temperature 1.25, kreg 2, lam 0.1', 'LAC, temperature 1')
    """
    label = f"{_name(rule).upper()}, temperature {rule.temperature:.4g}"
    if isinstance(rule, Cumulative) and rule.lam:
        label += f", kreg {rule.kreg}, lam {rule.lam:g}"
    return label


_WORDS = {
    "LAC": "LAC: all above one probability",
    "APS": "APS: the likeliest, up to a total probability",
    "RAPS": "RAPS: as APS, with a penalty on large sets",
}


def _explained(name: str) -> str:
    """Return a description of a candidate, without its penalty.

    >>> _explained("RAPS, temperature 1.2, kreg 2, lam 0.1")
    'RAPS: as APS, with a penalty on large sets, temperature 1.2'
    """
    method, temperature, *_ = name.split(", ")
    return _WORDS[method] + ("" if temperature == "temperature 1" else f", {temperature}")
