"""LAC, APS, RAPS and FFRAPS as a user meets them."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from tests.classification.material import METHODS, K, X, Y, network
from tests.conftest import normal


def test_sets_are_the_labels_with_a_score_below_the_conformal_quantile(make) -> None:
    predictor = make(network(), allow_zero_sets=True).calibrate(X[:200], Y[:200])
    for alpha in (0.05, 0.1, 0.5, Fraction(9, 10)):
        k = ffcp.conformal_rank(200, alpha)
        threshold = predictor.calibration.scores[k - 1, 0]
        sets = predictor.predict_set(X[200:], alpha, first_row=0)
        assert torch.equal(sets.mask, predictor.score_all(X[200:], first_row=0) <= threshold)
        assert torch.equal(sets.sizes, sets.mask.sum(dim=1))
        inside = sets.mask[torch.arange(100), Y[200:]].double().mean()
        assert float(sets.coverage(Y[200:])) == pytest.approx(float(inside))


def test_labels_of_a_set_come_by_score(make) -> None:
    predictor = make(network()).calibrate(X[:200], Y[:200])
    sets, scores = (
        predictor.predict_set(X[200:], first_row=0),
        predictor.score_all(X[200:], first_row=0),
    )
    for row, labels in enumerate(sets.labels):
        assert sorted(labels.tolist()) == sets.mask[row].nonzero()[:, 0].tolist()
        assert (scores[row, labels].diff() >= 0).all()


def test_no_set_is_empty_unless_allowed(make) -> None:
    # A share of 90 % misses leaves many sets empty.
    with_empty = make(network(), allow_zero_sets=True).calibrate(X[:200], Y[:200])
    without = make(network()).calibrate(X[:200], Y[:200])
    empty = with_empty.predict_set(X[200:], Fraction(9, 10), first_row=0).sizes == 0
    sets = without.predict_set(X[200:], Fraction(9, 10), first_row=0)
    assert empty.any()
    assert (sets.sizes >= 1).all()
    best = without.model.eval()(X[200:]).argmax(dim=1)
    assert (sets.mask[torch.arange(100), best][empty]).all()
    assert torch.equal(
        sets.mask[~empty],
        with_empty.predict_set(X[200:], Fraction(9, 10), first_row=0).mask[~empty],
    )


def test_score_is_the_column_of_score_all(make) -> None:
    predictor = make(network()).calibrate(X, Y)
    everything = predictor.score_all(X, first_row=0)
    assert everything.dtype == torch.float64
    assert torch.equal(predictor.score(X, Y, first_row=0), everything.gather(1, Y[:, None])[:, 0])


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_the_batch_size_changes_nothing(make, batch_size: int) -> None:
    # Logits come in, so that the model's own rounding has no part in it.
    logits = 3 * normal(120, K, seed=1)
    feature = {"model": nn.Sequential(nn.Identity())}
    whole = make(**feature).calibrate(logits, Y[:120])
    parts = make(**feature, batch_size=batch_size).calibrate(logits, Y[:120])
    streamed = make(**feature).calibrate(
        DataLoader(TensorDataset(logits, Y[:120]), batch_size=batch_size)
    )
    for other in (parts, streamed):
        assert torch.equal(other.calibration.scores, whole.calibration.scores)
        assert torch.equal(
            other.score_all(logits, first_row=0), whole.score_all(logits, first_row=0)
        )
        assert torch.equal(
            other.predict_set(logits, first_row=0).mask, whole.predict_set(logits, first_row=0).mask
        )


def test_a_stream_predicted_in_pieces_uses_one_random_number_per_row() -> None:
    predictor = ffcp.APS(network(), allow_zero_sets=True).calibrate(X[:200], Y[:200])
    whole = predictor.predict_set(X[200:], first_row=0).mask
    pieces = [predictor.predict_set(X[i : i + 1], first_row=i - 200).mask for i in range(200, 300)]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(
        predictor.score_all(X[250:], first_row=50), predictor.score_all(X[200:], first_row=0)[50:]
    )
    own = predictor.score(X[200:], Y[200:], first_row=0)
    assert torch.equal(predictor.score(X[250:], Y[250:], first_row=50), own[50:])


def test_random_numbers_go_on_from_call_to_call() -> None:
    predictor = ffcp.APS(network(), seed=0).calibrate(X, Y)
    first, second = predictor.score_all(X), predictor.score_all(X)
    assert not torch.equal(first, second)
    assert torch.equal(first, predictor.score_all(X, first_row=0))
    assert torch.equal(second, predictor.score_all(X, first_row=300))
    workers = [ffcp.APS(network()).calibrate(X, Y).score_all(X) for _ in range(2)]
    assert not torch.equal(*workers)


def test_update_continues_and_equals_one_calibration(make) -> None:
    logits = 3 * normal(120, K, seed=1)
    whole = make(nn.Sequential(nn.Identity())).calibrate(logits, Y[:120])
    steps = make(nn.Sequential(nn.Identity())).calibrate(logits[:50], Y[:50])
    steps.calibrate(logits[50:80], Y[50:80], update=True)
    steps.calibrate(logits[80:], Y[80:120], update=True)
    assert torch.equal(steps.calibration.scores, whole.calibration.scores)
    steps.calibrate(logits, Y[:120])  # and replaces without update
    assert torch.equal(steps.calibration.scores, whole.calibration.scores)


def test_the_seed_decides_and_calibration_and_prediction_draw_apart() -> None:
    one = ffcp.APS(network(), seed=1).calibrate(X, Y)
    again = ffcp.APS(network(), seed=1).calibrate(X, Y)
    other = ffcp.APS(network(), seed=2).calibrate(X, Y)
    assert torch.equal(one.calibration.scores, again.calibration.scores)
    assert torch.equal(one.score(X, Y, first_row=0), again.score(X, Y, first_row=0))
    assert not torch.equal(one.score(X, Y, first_row=0), other.score(X, Y, first_row=0))
    assert not torch.equal(one.calibration.scores[:, 0], one.score(X, Y, first_row=0).sort().values)


@pytest.mark.parametrize("name", ["APS", "RAPS", "FFRAPS", "FFRAPS at a feature"])
def test_without_randomness_sets_hold_those_of_every_share(name: str) -> None:
    def calibrated(randomized: bool) -> ffcp.SetPredictor:
        return METHODS[name](network(), randomized=randomized).calibrate(X[:200], Y[:200])

    drawn, fixed = calibrated(True), calibrated(False)
    assert torch.equal(drawn.calibration.scores, fixed.calibration.scores)
    sets = fixed.predict_set(X[200:]).mask
    assert torch.equal(sets, fixed.predict_set(X[200:]).mask)  # nothing is drawn
    some = [drawn.predict_set(X[200:], first_row=first).mask for first in range(0, 5000, 100)]
    assert all(bool((mask <= sets).all()) for mask in some)
    # And none but those: with many shares each of its labels is in some.
    assert torch.stack(some).any(dim=0).sum() > 0.95 * sets.sum()


def test_lam_makes_large_sets_rare() -> None:
    aps = ffcp.APS(network(50)).calibrate(X[:200], Y[:200])
    raps = ffcp.RAPS(network(50), lam=0.5, kreg=1).calibrate(X[:200], Y[:200])
    assert (
        raps.predict_set(X, first_row=0).sizes.max() < aps.predict_set(X, first_row=0).sizes.max()
    )


@pytest.mark.parametrize("gradient", [{}, {"gradient": "feature", "feature": "0"}])
def test_ffraps_without_delta_is_raps_to_the_bit(gradient: dict) -> None:
    raps = ffcp.RAPS(network(), lam=0.03, kreg=1, temperature=1.4, seed=0).calibrate(X, Y)
    ffraps = ffcp.FFRAPS(
        network(), delta=0, lam=0.03, kreg=1, temperature=1.4, seed=0, **gradient
    ).calibrate(X, Y)
    assert torch.equal(raps.calibration.scores, ffraps.calibration.scores)
    assert torch.equal(raps.score_all(X, first_row=0), ffraps.score_all(X, first_row=0))
    assert torch.equal(
        raps.predict_set(X, first_row=0).mask, ffraps.predict_set(X, first_row=0).mask
    )


@pytest.mark.parametrize("feature", ["input", "0", "3"])
def test_the_feature_gradient_is_that_of_the_top_probability(feature: str) -> None:
    model = network().eval()
    settings = {"lam": 0.03, "kreg": 1, "temperature": 1.4, "batch_size": 50}
    raps = ffcp.RAPS(model, **settings)
    ffraps = ffcp.FFRAPS(model, delta=0.5, gradient="feature", feature=feature, **settings)
    cut = 0 if feature == "input" else int(feature) + 1
    v = model[:cut](X).detach().requires_grad_()
    top = model[cut:](v).softmax(dim=1).amax(dim=1)
    norms = torch.autograd.grad(top.sum(), v)[0].norm(dim=1).double()
    torch.testing.assert_close(
        ffraps.score_all(X, first_row=0),
        raps.score_all(X, first_row=0) + 0.5 * norms[:, None],
        rtol=0,
        atol=1e-6,
    )
    assert norms.min() < 0.5 * norms.max()


def test_a_feature_of_several_tensors_counts_as_one() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, K)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a * b)

    model = Pair()
    settings = {"gradient": "feature", "feature": "input", "lam": 0, "kreg": 0}
    pair = ffcp.FFRAPS(model, 1.0, **settings).score_all((X, 2 * X), first_row=0)
    base = ffcp.APS(model).score_all((X, 2 * X), first_row=0)
    v = [t.clone().requires_grad_() for t in (X, 2 * X)]
    grads = torch.autograd.grad(model(*v).softmax(dim=1).amax(dim=1).sum(), v)
    norms = torch.cat(grads, dim=1).norm(dim=1).double()
    torch.testing.assert_close(pair - base, norms[:, None].expand(-1, K), rtol=0, atol=1e-6)


def test_the_model_is_left_as_it_was(make) -> None:
    model = network().train()
    model[0].weight.requires_grad_(False)
    predictor = make(model).calibrate(X, Y)
    first, second = (
        predictor.predict_set(X, first_row=0).mask,
        predictor.predict_set(X, first_row=0).mask,
    )
    assert torch.equal(first, second)  # no dropout
    assert all(module.training for module in model.modules())
    assert not model[0].weight.requires_grad
    assert model[3].weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_under_the_callers_grad_mode(make, mode) -> None:
    expected, predictor = make(network()).calibrate(X, Y), make(network())
    with mode():
        predictor.calibrate(X.clone(), Y.clone())
        mask = predictor.predict_set(X.clone(), first_row=0).mask
        labels = predictor.predict_set(X, first_row=0).labels
    assert torch.equal(predictor.calibration.scores, expected.calibration.scores)
    assert torch.equal(mask, expected.predict_set(X, first_row=0).mask)
    assert [row.tolist() for row in labels] == [
        r.tolist() for r in expected.predict_set(X, first_row=0).labels
    ]
    predictor.calibrate(X, Y, update=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_precision(make, dtype: torch.dtype) -> None:
    predictor = make(network().to(dtype)).calibrate(X.to(dtype), Y)
    sets = predictor.predict_set(X.to(dtype), 0.2, first_row=0)
    assert float(sets.coverage(Y)) > 0.7
    assert predictor.calibration.scores.dtype == torch.float64


def test_arrays_lists_and_small_integers_are_labels_too() -> None:
    expected = ffcp.RAPS(network(), seed=0).calibrate(X, Y).calibration.scores
    for y in (Y.numpy(), Y.tolist(), Y.to(torch.uint8), Y.numpy().astype(np.int16)):
        predictor = ffcp.RAPS(network(), seed=0).calibrate(X.numpy(), y)
        assert torch.equal(predictor.calibration.scores, expected)
        assert float(predictor.predict_set(X, first_row=0).coverage(y)) > 0.85


def test_two_classes(make) -> None:
    y = (Y > 2).long()
    predictor = make(network(2)).calibrate(X[:200], y[:200])
    assert float(predictor.predict_set(X[200:], 0.1, first_row=0).coverage(y[200:])) > 0.8


def test_too_few_points_give_all_labels_and_say_how_many_would_do(make) -> None:
    predictor = make(network()).calibrate(X[:8], Y[:8])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b8\b"):
        sets = predictor.predict_set(X, 0.1, first_row=0)
    assert sets.mask.all()
    predictor.calibrate(X[8:9], Y[8:9], update=True)
    predictor.predict_set(X, 0.1, first_row=0)  # one more suffices: no warning


# -- class-conditional -------------------------------------------------------------------------


def test_each_class_has_its_own_quantile(make) -> None:
    predictor = make(network(), class_conditional=True, allow_zero_sets=True).calibrate(X, Y)
    marginal = make(network()).calibrate(X, Y)
    labels, scores = predictor.calibration.rows["label"], predictor.calibration.scores[:, 0]
    assert torch.equal(scores.sort().values, marginal.calibration.scores[:, 0])
    thresholds = []
    for label in range(K):
        own = scores[labels == label]
        assert len(own) == Y.tolist().count(label)
        thresholds.append(float(ffcp.conformal_quantile(own, 0.2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        sets = predictor.predict_set(X, 0.2, first_row=0)
    expected = predictor.score_all(X, first_row=0) <= torch.tensor(thresholds, dtype=torch.float64)
    assert torch.equal(sets.mask, expected)


def test_classes_with_too_few_points_are_in_every_set() -> None:
    logits = normal(70, 1000, seed=2)
    y = torch.tensor([5] * 30 + [7] * 30 + [9] * 8 + [11] * 2)
    predictor = ffcp.RAPS(nn.Identity(), class_conditional=True).calibrate(logits, y)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b998\b"):
        sets = predictor.predict_set(logits, 0.1, first_row=0)
    always = sets.mask.all(dim=0)
    assert int(always.sum()) == 998
    assert not always[[5, 7]].any()


@pytest.mark.parametrize("make", [ffcp.LAC, ffcp.APS, ffcp.RAPS])
def test_sets_and_scores_of_a_loader(make) -> None:
    x, y = torch.randn(60, 4), torch.randint(0, 3, (60,))
    predictor = make(nn.Linear(4, 3)).calibrate(x, y)
    expected = predictor.predict_set(x, first_row=0)
    pairs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    for loader in (pairs, iter(x.split(11))):
        made = predictor.predict_set(loader, first_row=0)
        assert made.mask.equal(expected.mask)
        assert all(a.equal(b) for a, b in zip(made.labels, expected.labels, strict=True))
    whole = predictor.score(x, y, first_row=0)
    torch.testing.assert_close(predictor.score(pairs, first_row=0), whole)
    again = predictor(x, 0.3, first_row=0).mask
    assert again.equal(predictor.predict_set(x, 0.3, first_row=0).mask)
