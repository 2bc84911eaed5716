"""Temperature, kreg, lam and delta: chosen on rows that do not calibrate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from ffcp.classification import rules
from ffcp.classification.tuning import fit_temperature
from tests.classification.material import TUNED, K, X, Y, network
from tests.conftest import normal
from tests.core import calibration_shares, few_rows_tune, scores_by_group, set_aside

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("temperature", [1.0, "fit"])
def test_only_rows_that_do_not_calibrate_tune(name: str, temperature: object) -> None:
    split = set_aside(300)
    predictor = TUNED[name](network(), temperature=temperature).calibrate(X, Y)
    assert len(predictor.calibration) == 240
    assert predictor.choice.rows == int(split.sum()) == 60
    # Other calibration rows: the same choice.
    x, y = X.clone(), Y.clone()
    x[~split], y[~split] = 3 * normal(240, 4, seed=9), torch.arange(240) % K
    other = TUNED[name](network(), temperature=temperature).calibrate(x, y)
    assert other.choice == predictor.choice
    assert not torch.equal(other.calibration.scores, predictor.calibration.scores)
    # Other tuning rows: the same calibration points, scored with what these chose.
    y = Y.clone()
    y[split] = (y[split] + 3) % K
    changed = TUNED[name](network(), temperature=temperature).calibrate(X, y)
    assert changed.choice != predictor.choice
    # The scores are those of an untuned predictor with the chosen values.
    plain = rebuilt(predictor).calibrate(X, Y, groups=split)
    torch.testing.assert_close(
        scores_by_group(plain)[False], predictor.calibration.scores, rtol=0, atol=1e-5
    )


def rebuilt(predictor: ffcp.SetPredictor) -> ffcp.SetPredictor:
    names = ("temperature", "lam", "kreg", "delta", "gradient", "feature")
    settings = {k: getattr(predictor, k) for k in names if getattr(predictor, k, None) is not None}
    return type(predictor)(network(), seed=0, **settings)


def test_kreg_is_the_usual_rank_and_the_grids_hold_raps() -> None:
    predictor = ffcp.FFRAPS(network(), tune="size").calibrate(X, Y)
    split = set_aside(300)
    with torch.no_grad():
        logits = network().eval()(X[split])
    ranks = (logits > logits.gather(1, Y[split][:, None])).sum(dim=1) + 1
    assert predictor.kreg == predictor.choice.kreg == int(ranks.sort().values[54 - 1])
    tried = {(c.lam, c.delta) for c in predictor.choice.candidates}
    assert len(tried) == len(predictor.choice.candidates) == 5 * 9
    assert (0.01, 0.0) in tried
    assert all(c.kreg == predictor.kreg for c in predictor.choice.candidates)


@pytest.mark.parametrize("criterion", ["size", "coverage"])
@pytest.mark.parametrize("allow_zero_sets", [False, True])
def test_candidates_are_judged_by_their_sets(criterion: str, allow_zero_sets: bool) -> None:
    # Calibrate an untuned predictor on the tuning rows and predict them with the same shares.
    predictor = ffcp.FFRAPS(
        nn.Identity(), tune=criterion, tune_alpha=0.2, allow_zero_sets=allow_zero_sets,
        tune_fraction=0.5, seed=0,
    )  # fmt: skip
    logits = 2 * normal(300, 30, seed=4)
    y = (logits + normal(300, 30, seed=5)).argmax(dim=1)
    predictor.calibrate(logits, y)
    split = set_aside(300, 0.5)
    share = calibration_shares(300)[split]
    rows = rules.LabelRows(logits[split], share)
    for candidate in predictor.choice.candidates:
        score = rules.Cumulative(1.0, candidate.lam, candidate.kreg, candidate.delta)
        scores = rules.label_scores(score, rows, y[split])
        level = scores.sort().values[math.ceil(len(scores) * 0.8) - 1]
        mask = rules.label_mask(score, rows, level, allow_empty=allow_zero_sets)
        assert candidate.mean_size == pytest.approx(ffcp.metrics.mean_set_size(mask))
        violation = ffcp.metrics.size_stratified_violation(mask, y[split], 0.2)
        assert candidate.violation == pytest.approx(violation)
    costs = [
        c.mean_size if criterion == "size" else c.violation for c in predictor.choice.candidates
    ]
    best = predictor.choice.candidates[costs.index(min(costs))]
    assert (predictor.lam, predictor.delta) == (best.lam, best.delta)


def test_what_is_given_is_not_tuned() -> None:
    predictor = ffcp.FFRAPS(network(), lam=0.123, delta=0.0, tune="size").calibrate(X, Y)
    assert (predictor.lam, predictor.delta) == (0.123, 0.0)
    assert [c.lam for c in predictor.choice.candidates] == [0.123]
    kreg = ffcp.RAPS(network(), kreg=4, tune="size").calibrate(X, Y)
    assert kreg.kreg == 4
    assert len(kreg.choice.candidates) == 5


def test_defaults_without_tuning() -> None:
    predictor = ffcp.FFRAPS(network())
    assert (predictor.lam, predictor.kreg, predictor.delta) == (0.01, 5, 0.01)
    assert predictor.temperature == 1
    assert predictor.choice is None


def test_the_choice_can_be_read() -> None:
    predictor = ffcp.RAPS(network(), tune="size", temperature="fit").calibrate(X, Y)
    text = str(predictor.choice).splitlines()
    assert all(word in text[0] for word in ("60", "size", "alpha=0.1"))
    assert len(text) == 1 + 5
    assert f"lam {predictor.lam:<8g}" in text[1]  # best first
    assert "kreg" not in str(ffcp.APS(network(), temperature="fit").calibrate(X, Y).choice)


@pytest.mark.parametrize("name", TUNED)
def test_loaders_and_arrays_tune_alike_and_enough_rows_stop_it(name: str, monkeypatch) -> None:
    few_rows_tune(monkeypatch, 25)
    logits = 2 * normal(300, K, seed=4)

    def identity() -> nn.Module:
        return nn.Sequential(nn.Identity())

    whole = TUNED[name](identity()).calibrate(logits, Y)
    assert whole.choice.rows == 25
    assert len(whole.calibration) == 275
    for size in (1, 32, 299):
        loader = DataLoader(TensorDataset(logits, Y), batch_size=size)
        streamed = TUNED[name](identity()).calibrate(loader)
        assert streamed.choice == whole.choice
        assert torch.equal(streamed.calibration.scores, whole.calibration.scores)


def test_update_keeps_the_choice_and_calibrates_all_rows() -> None:
    predictor = ffcp.RAPS(network(), tune="size", temperature="fit").calibrate(X, Y)
    choice = predictor.choice
    predictor.calibrate(X[:50], Y[:50], update=True)
    assert predictor.choice is choice
    assert len(predictor.calibration) == 240 + 50
    predictor.calibrate(X[:100], Y[:100])  # anew: tunes again
    assert predictor.choice.rows == 20


def test_scores_need_a_choice_first() -> None:
    predictor = ffcp.RAPS(network(), tune="size", temperature="fit")
    assert (predictor.lam, predictor.kreg, predictor.temperature) == (None, None, None)
    for call in (lambda: predictor.score(X, Y), lambda: predictor.score_all(X)):
        with pytest.raises(RuntimeError, match="kreg"):
            call()


# -- temperature -------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [0.3, 1.0, 2.5, 8.0])
def test_the_fitted_temperature_minimises_the_likelihood(true: float) -> None:
    logits = 4 * normal(4000, 12, seed=6).double()
    y = torch.multinomial((logits / true).softmax(1), 1, generator=torch.manual_seed(0))[:, 0]
    fitted = fit_temperature(logits, y)
    assert fitted == pytest.approx(true, rel=0.1)

    def loss(temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / temperature, y))

    assert loss(fitted) < min(loss(0.999 * fitted), loss(1.001 * fitted))


def test_a_temperature_without_optimum_stays_in_bounds() -> None:
    logits = torch.eye(3) * 5
    assert 0.05 <= fit_temperature(logits, torch.arange(3)) < 0.06  # always right
    assert 19 < fit_temperature(logits, torch.tensor([1, 2, 0])) <= 20  # always wrong
    assert fit_temperature(torch.zeros(3, 4), torch.arange(3)) == 1  # knows nothing
