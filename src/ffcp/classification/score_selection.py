"""Choosing the label score itself, LAC, APS or RAPS, on rows that do not calibrate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ffcp import files
from ffcp.classification import rules, tuning
from ffcp.classification.named_scores import APSScore, LACScore, RAPSScore
from ffcp.classification.rules import Cumulative, Rows, Threshold
from ffcp.classification.scores import FIT, LabelScore, RuleScore, as_score, known_rows
from ffcp.conformal.columns import Columns
from ffcp.conformal.rank import exact_alpha
from ffcp.conformal.selection import Chosen

AUTO = "auto"
_FEWEST = 20  # rows set aside below which mean sizes say nothing
_NAMED: Mapping[str, Callable[..., RuleScore]] = {
    "lac": LACScore,
    "aps": APSScore,
    "raps": RAPSScore,
}


@dataclass(frozen=True)
class ScoreChoice:
    """Which label score was chosen, and how all candidates did.

    Attributes
    ----------
    score
        The one that was taken, with its settings.
    trials
        For each candidate how many labels its sets hold on average, over the rows set aside. The
        best is taken if its sets are smaller than those of plain LAC by more than a standard error.
    rows
        How many rows chose. They took no part in the calibration. 0 if there were too few.
    alpha
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

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.score}, without a choice: fewer than {_FEWEST} rows could be spared"
        by = f"chosen by mean size of sets on {self.rows} rows at alpha={self.alpha:g}"
        ranked = sorted(self.trials.items(), key=lambda trial: trial[1])
        lines = [f"  {name:<42} mean size {size:.4g}" for name, size in ranked]
        return "\n".join([f"{self.score}, {by}", *lines])


class Undecided(RuleScore):
    """A label score that is being chosen: of every row the logits are noted, and a random share."""

    what_is_open = "the label score"
    fewest_rows = _FEWEST

    def __init__(self, allow_empty: bool = False) -> None:
        given = {"temperature": FIT, "lam": None, "kreg": None}
        super().__init__(
            AUTO, given, Cumulative, tune=tuning.SIZE, randomized=True, allow_empty=allow_empty
        )

    def restored(self, settings: Mapping[str, Any]) -> Any:
        """Give the score that was chosen and saved."""
        name = settings.get("score")
        return self._named(name, settings) if name in _NAMED else self

    def choices_from(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Build the choice again."""
        choice = saved.get("score")
        return {} if choice is None else {"score": files.rebuilt(ScoreChoice, choice)}

    def without_choice(self, rows: int, alpha: Any) -> Chosen:
        """Take LAC, and no row to choose it."""
        score = self._named("lac", {"temperature": 1.0})
        choice = ScoreChoice(_called(Threshold()), {}, 0, float(exact_alpha(alpha)))
        why = (
            f"LAC is used: of {rows} rows none can be spared to choose the label score. Give more "
            "rows, or name the score"
        )
        return Chosen(score, {"score": choice}, why)

    def choose(
        self, aside: Columns, alpha: Any, left: int = 0, weights: Tensor | None = None
    ) -> Chosen:
        """Compare all candidates on rows set aside, and take the one with the smallest sets."""
        rows, labels, level = known_rows(aside, alpha)
        trials = list(self._trials(rows, labels, level))
        (plain, _), (rule, _) = trials[0], min(trials, key=lambda trial: trial[1])
        # The best of many is a little lucky: where rows tell no difference, plain LAC is taken.
        gain = self._sizes(plain, rows, labels, level) - self._sizes(rule, rows, labels, level)
        if not gain.mean() > gain.std() / len(gain) ** 0.5:
            rule = plain
        sizes = {_called(one): size for one, size in trials}
        level = float(exact_alpha(alpha))
        choice = ScoreChoice(_called(rule), sizes, len(aside["label"]), level)
        settings = {"temperature": rule.temperature}
        if isinstance(rule, Cumulative) and rule.lam:
            settings.update(lam=rule.lam, kreg=rule.kreg)
        chosen = self._named(_kind(rule), settings)
        if chosen.draws:  # rows that are still to come go on in the stream of random numbers
            chosen = chosen.drawing(self.shares)
        return Chosen(chosen, {"score": choice})

    def _trials(
        self, rows: Rows, labels: Tensor, alpha: Any
    ) -> Iterator[tuple[Threshold | Cumulative, float]]:
        """Give each candidate with the mean size of its sets."""
        fitted = tuning.fit_temperature(rows.logits, labels)
        for temperature in (1.0, fitted):
            lac = Threshold(temperature)
            yield lac, float(self._sizes(lac, rows, labels, alpha).mean())
            tuned = tuning.tune(
                rows, labels, Cumulative(temperature), kreg=None,
                lams=(0.0, *tuning.LAMS[tuning.SIZE]), deltas=(0.0,), criterion=tuning.SIZE,
                alpha=alpha, allow_empty=self._allow_empty, randomized=True,
            )  # fmt: skip
            for one in tuned.candidates:
                yield Cumulative(temperature, lam=one.lam, kreg=one.kreg), one.mean_size

    def _sizes(
        self, rule: Threshold | Cumulative, rows: Rows, labels: Tensor, alpha: Any
    ) -> Tensor:
        """Count the labels in the set of each row."""
        threshold = tuning.quantile(rules.label_scores(rule, rows, labels), alpha)
        mask = rules.label_mask(rule, rows, threshold, allow_empty=self._allow_empty)
        return mask.sum(dim=1).double()

    def _named(self, name: Any, settings: Mapping[str, Any]) -> RuleScore:
        """Give a score by its name and settings, for the labels that this one takes."""
        taken = {"lac": ("temperature",), "aps": ("temperature",)}
        keys = taken.get(name, ("temperature", "lam", "kreg"))
        score = _NAMED[name](**{key: settings.get(key) for key in keys})
        return score.with_other_labels() if self.other_labels else score


def score_of(score: Any, allow_empty: bool) -> LabelScore:
    """Take a label score as it is; make one of a function, or one to be chosen of ``"auto"``."""
    return Undecided(allow_empty) if isinstance(score, str) and score == AUTO else as_score(score)


def _kind(rule: Threshold | Cumulative) -> str:
    if isinstance(rule, Threshold):
        return "lac"
    return "raps" if rule.lam else "aps"


def _called(rule: Threshold | Cumulative) -> str:
    """Name a candidate.

    >>> _called(Cumulative(1.25, lam=0.1, kreg=2)), _called(Threshold())
    ('RAPS, temperature 1.25, kreg 2, lam 0.1', 'LAC, temperature 1')
    """
    called = f"{_kind(rule).upper()}, temperature {rule.temperature:.4g}"
    if isinstance(rule, Cumulative) and rule.lam:
        called += f", kreg {rule.kreg}, lam {rule.lam:g}"
    return called
