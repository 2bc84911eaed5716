"""Excess risk: nothing where coverage does not depend on the input; else much of its square."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import ffcp
from ffcp import metrics
from ffcp.metrics.excess import ExcessRisk, excess_of

ROWS = 1500


def drawn(seed: int, share: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return which rows are covered, with a probability that may depend on inputs, and these."""
    random = np.random.default_rng(seed)
    x = random.random((ROWS, 4))
    return random.random(ROWS) < share(x), x


def test_it_is_not_positive_where_coverage_does_not_depend_on_the_input() -> None:
    found = [excess_of(*drawn(seed, lambda x: 0.9), 0.1) for seed in range(60)]
    assert stats.ttest_1samp([float(one) for one in found], 0, alternative="greater").pvalue > 0.001
    # An interval of 95 % lies wholly above 0 in at most one of 40: more than 7 of 60 are too many.
    assert sum(one.low > 0 for one in found) <= stats.binom(60, 0.025).ppf(0.999)


def test_it_is_not_positive_for_calibrated_intervals_of_noise_that_is_everywhere_alike() -> None:
    values = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(2 * ROWS, 4, generator=generator)
        y = torch.randn(2 * ROWS, generator=generator)
        model = torch.nn.Linear(4, 1).requires_grad_(False)
        model.weight.zero_(), model.bias.zero_()
        predictor = ffcp.CP(model).calibrate(x[:ROWS], y[:ROWS])
        interval = predictor.predict_interval(x[ROWS:], alpha=0.1)
        values.append(float(metrics.excess_risk(interval, y[ROWS:], x[ROWS:])))
    assert stats.ttest_1samp(values, 0, alternative="greater").pvalue > 0.001


@pytest.mark.parametrize(
    "share",
    [
        lambda x: np.clip(1.05 - 0.3 * x[:, 0], 0, 1),
        lambda x: np.where((x[:, 0] > 0.7) & (x[:, 1] > 0.5), 0.5, 0.97),
        lambda x: np.full(len(x), 0.7),  # off everywhere alike
    ],
)
def test_it_is_at_most_the_mean_square_and_finds_much_of_it(share: Any) -> None:
    truth = float(
        np.mean([np.mean((share(drawn(seed, share)[1]) - 0.9) ** 2) for seed in range(9)])
    )
    found = [float(excess_of(*drawn(seed, share), 0.1)) for seed in range(20)]
    error = stats.sem(found)
    assert np.mean(found) < truth + 3.1 * error
    assert np.mean(found) > 0.5 * truth


def test_its_interval_holds_the_mean_square_of_a_classifier_that_knows() -> None:
    """A classifier that knows the true coverage has the mean square for its expectation."""

    class Knows:
        def fit(self, x: Any, covered: Any) -> Knows:
            return self

        def predict_proba(self, x: Any) -> Any:
            share = 1.05 - 0.3 * x[:, 0]
            return np.column_stack([1 - share, share]).clip(0, 1)

    truth = np.mean((np.clip(1.05 - 0.3 * (np.arange(10**5) + 0.5) / 1e5, 0, 1) - 0.9) ** 2)
    held = 0
    for seed in range(100):
        hits, x = drawn(seed, lambda x: np.clip(1.05 - 0.3 * x[:, 0], 0, 1))
        found = excess_of(hits, x, 0.1, classifier=Knows())
        held += found.low <= truth <= found.high
    assert stats.binomtest(held, 100, 0.95).pvalue > 0.001


def test_a_classifier_that_learns_nothing_makes_it_negative_and_nothing_is_clipped() -> None:
    class Wrong:
        def fit(self, x: Any, covered: Any) -> Wrong:
            return self

        def predict_proba(self, x: Any) -> Any:
            return np.full((len(x), 2), 0.5)

    hits, x = drawn(0, lambda x: 0.9)
    found = excess_of(hits, x, 0.1, classifier=Wrong())
    assert float(found) == pytest.approx(np.mean((hits - 0.9) ** 2) - 0.25)
    assert found.high < 0


def test_every_row_is_predicted_once_from_others() -> None:
    class Watches:
        seen: list[tuple[set[float], set[float]]] = []  # noqa: RUF012

        def fit(self, x: Any, covered: Any) -> Watches:
            self.own = set(x[:, 0])
            return self

        def predict_proba(self, x: Any) -> Any:
            self.seen.append((self.own, set(x[:, 0])))
            return np.full((len(x), 2), 0.5)

    x = np.arange(100.0)[:, None]
    excess_of(np.arange(100) % 2, x, 0.1, classifier=Watches(), folds=4)
    assert len(Watches.seen) == 4
    assert all(not own & new and own | new == set(x[:, 0]) for own, new in Watches.seen)
    assert sorted(row for _, new in Watches.seen for row in new) == sorted(x[:, 0])


def test_it_agrees_with_mapie() -> None:
    conditional = pytest.importorskip("mapie.metrics.conditional")
    pytest.importorskip("covmetrics")
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.model_selection import KFold

    hits, x = drawn(3, lambda x: np.clip(1.05 - 0.3 * x[:, 0], 0, 1))
    y = np.where(hits, 0.5, 2.0)
    ends = np.zeros(ROWS), np.ones(ROWS)

    def brier(predicted: Any, covered: Any) -> Any:
        return (covered - predicted) ** 2

    ways: dict[str, Any] = {"max_iter": 40, "max_leaf_nodes": 4, "random_state": 0}
    theirs = conditional.excess_risk_target_coverage(
        x, y, 0.9, y_intervals=np.column_stack(ends), loss=brier, n_splits=5, random_state=0,
        model_cls=HistGradientBoostingClassifier, model_kwargs=ways,
    )  # fmt: skip
    classifier = HistGradientBoostingClassifier(**ways)
    ours = metrics.excess_risk(ends, y, x, 0.1, classifier=copy.deepcopy(classifier))
    assert ours.low < theirs < ours.high  # other folds, so not the same number
    guess = np.empty(ROWS)
    for train, test in KFold(5, shuffle=True, random_state=0).split(x):
        guess[test] = classifier.fit(x[train], hits[train]).predict_proba(x[test])[:, 1]
    assert theirs == pytest.approx(np.mean((hits - 0.9) ** 2 - (hits - guess) ** 2))


def test_what_cannot_be_measured_is_refused() -> None:
    x, y = torch.rand(20, 2), torch.rand(20, 2)
    box = torch.zeros(20, 2), torch.full((20, 2), 0.5)
    with pytest.raises(ValueError, match="joint=True"):
        metrics.excess_risk(box, y, x)
    assert metrics.excess_risk(box, y, x, joint=True).rows == 20
    with pytest.raises(ValueError, match="folds"):
        metrics.excess_risk(box, y, x, joint=True, folds=21)


def test_missing_targets_do_not_count() -> None:
    y = torch.rand(100)
    y[:10] = torch.nan
    ends = torch.zeros(100), torch.full((100,), 0.9)
    assert metrics.excess_risk(ends, y, torch.rand(100, 2), missing=True).rows == 90


def test_without_lightgbm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lightgbm", None)
    hits, x = drawn(0, lambda x: 0.9)
    with pytest.raises(ImportError, match=r"ffcp\[trees\]"):
        excess_of(hits, x, 0.1)


def test_it_is_copied_with_its_interval() -> None:
    risk = ExcessRisk(0.01, 0.004, rows=1000, confidence=0.9)
    for again in (pickle.loads(pickle.dumps(risk)), copy.copy(risk)):
        assert (again, again.low, again.high, again.rows) == (0.01, risk.low, risk.high, 1000)
