"""LAC, APS, RAPS and FFRAPS as a user meets them."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ffcp
from ffcp import classifiers
from tests.conftest import normal, small_mlp

K = 6
X = normal(300, 4, seed=0)


def network(outputs: int = K) -> nn.Sequential:
    """Linear layers at 0, 3 and 6; dropout between, which eval mode must switch off."""
    model = small_mlp(outputs=outputs)
    with torch.no_grad():
        model[6].weight.mul_(8)
    return model


def labels_for(x: Tensor, model: nn.Module, seed: int = 0) -> Tensor:
    with torch.no_grad():
        p = model.eval()(x).softmax(dim=1)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


Y = labels_for(X, network())

METHODS = {
    "LAC": ffcp.LAC,
    "APS": ffcp.APS,
    "RAPS": lambda model, **kw: ffcp.RAPS(model, lam=0.05, kreg=2, **kw),
    "FFRAPS": lambda model, **kw: ffcp.FFRAPS(model, delta=0.1, lam=0.05, kreg=2, **kw),
    "FFRAPS at a feature": lambda model, **kw: ffcp.FFRAPS(
        model, delta=0.1, lam=0.05, kreg=2, gradient="feature", feature="0", **kw
    ),
}


@pytest.fixture(params=METHODS)
def make(request: pytest.FixtureRequest):
    return METHODS[request.param]


# -- what predictors give ----------------------------------------------------------------------


def test_sets_are_the_labels_with_a_score_below_the_conformal_quantile(make) -> None:
    predictor = make(network(), allow_zero_sets=True).calibrate(X[:200], Y[:200])
    for alpha in (0.05, 0.1, 0.5, 0.9):
        k = ffcp.conformal_rank(200, alpha)
        threshold = predictor.calibration.scores[k - 1, 0]
        found = predictor.predict_set(X[200:], alpha)
        assert torch.equal(found.mask, predictor.score_all(X[200:]) <= threshold)
        assert torch.equal(found.sizes, found.mask.sum(dim=1))
        inside = found.mask[torch.arange(100), Y[200:]].double().mean()
        assert float(found.coverage(Y[200:])) == pytest.approx(float(inside))


def test_labels_of_a_set_come_by_score(make) -> None:
    predictor = make(network()).calibrate(X[:200], Y[:200])
    found, scores = predictor.predict_set(X[200:]), predictor.score_all(X[200:])
    for row, labels in enumerate(found.labels):
        assert sorted(labels.tolist()) == found.mask[row].nonzero()[:, 0].tolist()
        assert (scores[row, labels].diff() >= 0).all()


def test_no_set_is_empty_unless_allowed(make) -> None:
    # A share of 90 % misses leaves many sets empty.
    with_empty = make(network(), allow_zero_sets=True).calibrate(X[:200], Y[:200])
    without = make(network()).calibrate(X[:200], Y[:200])
    empty = with_empty.predict_set(X[200:], 0.9).sizes == 0
    found = without.predict_set(X[200:], 0.9)
    assert empty.any()
    assert (found.sizes >= 1).all()
    best = without.model.eval()(X[200:]).argmax(dim=1)
    assert (found.mask[torch.arange(100), best][empty]).all()
    assert torch.equal(found.mask[~empty], with_empty.predict_set(X[200:], 0.9).mask[~empty])


def test_score_is_the_column_of_score_all(make) -> None:
    predictor = make(network()).calibrate(X, Y)
    everything = predictor.score_all(X)
    assert everything.dtype == torch.float64
    assert torch.equal(predictor.score(X, Y), everything.gather(1, Y[:, None])[:, 0])


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
        assert torch.equal(other.score_all(logits), whole.score_all(logits))
        assert torch.equal(other.predict_set(logits).mask, whole.predict_set(logits).mask)


def test_a_stream_predicted_in_pieces_uses_one_random_number_per_row() -> None:
    predictor = ffcp.APS(network(), allow_zero_sets=True).calibrate(X[:200], Y[:200])
    whole = predictor.predict_set(X[200:]).mask
    pieces = [predictor.predict_set(X[i : i + 1], first_row=i - 200).mask for i in range(200, 300)]
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(
        predictor.score_all(X[250:], first_row=50), predictor.score_all(X[200:])[50:]
    )
    own = predictor.score(X[200:], Y[200:])
    assert torch.equal(predictor.score(X[250:], Y[250:], first_row=50), own[50:])


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
    assert torch.equal(one.score(X, Y), again.score(X, Y))
    assert not torch.equal(one.score(X, Y), other.score(X, Y))
    assert not torch.equal(one.calibration.scores[:, 0], one.score(X, Y).sort().values)


def test_without_randomness_sets_are_larger() -> None:
    sizes = [
        ffcp.APS(network(), randomized=randomized)
        .calibrate(X[:200], Y[:200])
        .predict_set(X[200:])
        .sizes.sum()
        for randomized in (True, False)
    ]
    assert sizes[0] < sizes[1]
    fixed = ffcp.APS(network(), randomized=False).calibrate(X, Y)
    assert torch.equal(fixed.calibration.scores[:, 0], fixed.score(X, Y).sort().values)


def test_lam_makes_large_sets_rare() -> None:
    aps = ffcp.APS(network(50)).calibrate(X[:200], Y[:200])
    raps = ffcp.RAPS(network(50), lam=0.5, kreg=1).calibrate(X[:200], Y[:200])
    assert raps.predict_set(X).sizes.max() < aps.predict_set(X).sizes.max()


@pytest.mark.parametrize("gradient", [{}, {"gradient": "feature", "feature": "0"}])
def test_ffraps_without_delta_is_raps_to_the_bit(gradient: dict) -> None:
    raps = ffcp.RAPS(network(), lam=0.03, kreg=1, temperature=1.4).calibrate(X, Y)
    ffraps = ffcp.FFRAPS(
        network(), delta=0, lam=0.03, kreg=1, temperature=1.4, **gradient
    ).calibrate(X, Y)
    assert torch.equal(raps.calibration.scores, ffraps.calibration.scores)
    assert torch.equal(raps.score_all(X), ffraps.score_all(X))
    assert torch.equal(raps.predict_set(X).mask, ffraps.predict_set(X).mask)


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
        ffraps.score_all(X), raps.score_all(X) + 0.5 * norms[:, None], rtol=0, atol=1e-6
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
    pair = ffcp.FFRAPS(model, 1.0, **settings).score_all((X, 2 * X))
    base = ffcp.APS(model).score_all((X, 2 * X))
    v = [t.clone().requires_grad_() for t in (X, 2 * X)]
    grads = torch.autograd.grad(model(*v).softmax(dim=1).amax(dim=1).sum(), v)
    norms = torch.cat(grads, dim=1).norm(dim=1).double()
    torch.testing.assert_close(pair - base, norms[:, None].expand(-1, K), rtol=0, atol=1e-6)


def test_the_model_is_left_as_it_was(make) -> None:
    model = network().train()
    model[0].weight.requires_grad_(False)
    predictor = make(model).calibrate(X, Y)
    first, second = predictor.predict_set(X).mask, predictor.predict_set(X).mask
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
        mask = predictor.predict_set(X.clone()).mask
        labels = predictor.predict_set(X).labels
    assert torch.equal(predictor.calibration.scores, expected.calibration.scores)
    assert torch.equal(mask, expected.predict_set(X).mask)
    assert [row.tolist() for row in labels] == [r.tolist() for r in expected.predict_set(X).labels]
    predictor.calibrate(X, Y, update=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_precision(make, dtype: torch.dtype) -> None:
    predictor = make(network().to(dtype)).calibrate(X.to(dtype), Y)
    found = predictor.predict_set(X.to(dtype), 0.2)
    assert float(found.coverage(Y)) > 0.7
    assert predictor.calibration.scores.dtype == torch.float64


def test_arrays_lists_and_small_integers_are_labels_too() -> None:
    expected = ffcp.RAPS(network()).calibrate(X, Y).calibration.scores
    for y in (Y.numpy(), Y.tolist(), Y.to(torch.uint8), Y.numpy().astype(np.int16)):
        predictor = ffcp.RAPS(network()).calibrate(X.numpy(), y)
        assert torch.equal(predictor.calibration.scores, expected)
        assert float(predictor.predict_set(X).coverage(y)) > 0.85


def test_two_classes(make) -> None:
    y = (Y > 2).long()
    predictor = make(network(2)).calibrate(X[:200], y[:200])
    assert float(predictor.predict_set(X[200:], 0.1).coverage(y[200:])) > 0.8


def test_too_few_points_give_all_labels_and_say_how_many_would_do(make) -> None:
    predictor = make(network()).calibrate(X[:8], Y[:8])
    with pytest.warns(
        ffcp.FFCPWarning, match="all labels.*at least 9 calibration points and there are 8"
    ):
        found = predictor.predict_set(X, 0.1)
    assert found.mask.all()
    predictor.calibrate(X[8:9], Y[8:9], update=True)
    predictor.predict_set(X, 0.1)  # one more suffices: no warning


# -- class-conditional -------------------------------------------------------------------------


def test_each_class_has_its_own_quantile(make) -> None:
    predictor = make(network(), class_conditional=True, allow_zero_sets=True).calibrate(X, Y)
    marginal = make(network()).calibrate(X, Y)
    labels, scores = predictor.calibration.scores.unbind(dim=1)
    assert torch.equal(scores.sort().values, marginal.calibration.scores[:, 0])
    thresholds = []
    for label in range(K):
        own = scores[labels == label]
        assert len(own) == Y.tolist().count(label)
        thresholds.append(float(ffcp.conformal_quantile(own, 0.2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        found = predictor.predict_set(X, 0.2)
    expected = predictor.score_all(X) <= torch.tensor(thresholds, dtype=torch.float64)
    assert torch.equal(found.mask, expected)


def test_classes_with_too_few_points_are_in_every_set() -> None:
    logits = normal(70, 1000, seed=2)
    y = torch.tensor([5] * 30 + [7] * 30 + [9] * 8 + [11] * 2)
    predictor = ffcp.RAPS(nn.Identity(), class_conditional=True).calibrate(logits, y)
    with pytest.warns(
        ffcp.FFCPWarning, match=r"998 of 1000 classes are in every set.*at least 9 .* each class"
    ):
        found = predictor.predict_set(logits, 0.1)
    always = found.mask.all(dim=0)
    assert int(always.sum()) == 998
    assert not always[[5, 7]].any()


# -- tuning ------------------------------------------------------------------------------------

TUNED = {
    "RAPS by size": lambda model, **kw: ffcp.RAPS(model, tune="size", **kw),
    "RAPS by coverage": lambda model, **kw: ffcp.RAPS(model, tune="coverage", **kw),
    "FFRAPS by size": lambda model, **kw: ffcp.FFRAPS(model, tune="size", **kw),
    "FFRAPS at a feature by coverage": lambda model, **kw: ffcp.FFRAPS(
        model, gradient="feature", feature="0", tune="coverage", **kw
    ),
    "APS, temperature": lambda model, **kw: ffcp.APS(model, **{**kw, "temperature": "fit"}),
    "LAC, temperature": lambda model, **kw: ffcp.LAC(model, **{**kw, "temperature": "fit"}),
}


@pytest.mark.parametrize("name", TUNED)
@pytest.mark.parametrize("temperature", [1.0, "fit"])
def test_only_rows_that_do_not_calibrate_tune(name: str, temperature: object) -> None:
    split = ffcp.choose.RowSplit(0.2, 0).mask(300)
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
    plain = rebuilt(predictor)
    for row in (~split).nonzero()[:, 0].tolist():
        plain._drawn = {0: row}
        plain.calibrate(X[row : row + 1], Y[row : row + 1], update=True)
    torch.testing.assert_close(
        plain.calibration.scores, predictor.calibration.scores, rtol=0, atol=1e-5
    )


def rebuilt(predictor: classifiers.SetPredictor) -> classifiers.SetPredictor:
    names = ("temperature", "lam", "kreg", "delta", "gradient", "feature")
    settings = {k: getattr(predictor, k) for k in names if getattr(predictor, k, None) is not None}
    return type(predictor)(network(), **settings)


def test_kreg_is_the_usual_rank_and_the_grids_hold_raps() -> None:
    predictor = ffcp.FFRAPS(network(), tune="size").calibrate(X, Y)
    split = ffcp.choose.RowSplit(0.2, 0).mask(300)
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
        tune_fraction=0.5,
    )  # fmt: skip
    logits = 2 * normal(300, 30, seed=4)
    y = (logits + normal(300, 30, seed=5)).argmax(dim=1)
    predictor.calibrate(logits, y)
    split = ffcp.choose.RowSplit(0.5, 0).mask(300)
    share = ffcp.sets.uniforms(0, classifiers._CALIBRATION, 0, 300)[split]
    rows = ffcp.sets.Rows(logits[split], share)
    for candidate in predictor.choice.candidates:
        score = ffcp.sets.Cumulative(1.0, candidate.lam, candidate.kreg, candidate.delta)
        scores = ffcp.sets.label_scores(score, rows, y[split])
        level = scores.sort().values[math.ceil(len(scores) * 0.8) - 1]
        mask = ffcp.sets.label_mask(score, rows, level, allow_empty=allow_zero_sets)
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
    assert "chosen on 60 rows by size at alpha=0.1" in text[0]
    assert len(text) == 1 + 5
    assert f"lam {predictor.lam:<8g}" in text[1]  # best first
    assert "kreg" not in str(ffcp.APS(network(), temperature="fit").calibrate(X, Y).choice)


@pytest.mark.parametrize("name", TUNED)
def test_loaders_and_arrays_tune_alike_and_enough_rows_stop_it(name: str, monkeypatch) -> None:
    monkeypatch.setattr(ffcp.tuning, "_ENOUGH_ROWS", 25)
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
        with pytest.raises(RuntimeError, match="temperature, lam, kreg not chosen yet"):
            call()


# -- merge, save, load -------------------------------------------------------------------------


def test_workers_merge(make) -> None:
    kinds = {} if make is ffcp.LAC else {"randomized": False}
    for conditional in (False, True):
        settings = {**kinds, "class_conditional": conditional}
        whole = make(network(), **settings).calibrate(X, Y)
        merged = make(network(), **settings)
        for part in (slice(0, 100), slice(100, 300)):
            merged.merge(make(network(), **settings).calibrate(X[part], Y[part]))
        # Another batch is another rounding of the model.
        torch.testing.assert_close(
            merged.calibration.scores, whole.calibration.scores, rtol=0, atol=1e-5
        )
        assert merged.classes == K


def test_workers_of_a_randomised_method_need_their_own_seeds() -> None:
    one, two, three = (ffcp.APS(network(), seed=s).calibrate(X, Y) for s in (0, 1, 0))
    with pytest.raises(ValueError, match=r"with seed 0.*give each worker its own seed"):
        one.merge(three)
    assert len(one.merge(two).calibration) == 600
    with pytest.raises(ValueError, match="give each worker its own seed"):
        two.merge(one)
    with pytest.raises(ValueError, match="with seed 1"):  # its numbers came with the merge
        one.merge(ffcp.APS(network(), seed=1).calibrate(X, Y))


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (lambda: ffcp.RAPS(network(), lam=0.2, seed=1), ValueError, r"lam=0.2 \(here 0.01\)"),
        (lambda: ffcp.APS(network(), seed=1), ValueError, "method='APS'"),
        (lambda: ffcp.RAPS(network(), temperature=2.0, seed=1), ValueError, "temperature=2.0"),
        (lambda: ffcp.RAPS(network(), randomized=False), ValueError, "randomized=False"),
        (
            lambda: ffcp.RAPS(network(), class_conditional=True, seed=1),
            ValueError,
            "class_conditional=True",
        ),
        (lambda: ffcp.RAPS(network(7), seed=1), ValueError, "6 classes, the predictor .* on 7"),
    ],
)
def test_what_cannot_be_merged(other, error: type, message: str) -> None:
    mine = ffcp.RAPS(network()).calibrate(X, Y)
    with pytest.raises(error, match=message):
        mine.merge(other().calibrate(X, Y))
    assert len(mine.calibration) == 300


def test_an_empty_predictor_goes_on_where_the_merged_one_stopped() -> None:
    whole = ffcp.APS(network()).calibrate(X, Y).calibrate(X[:50], Y[:50], update=True)
    merged = ffcp.APS(network()).merge(ffcp.APS(network()).calibrate(X, Y))
    merged.calibrate(X[:50], Y[:50], update=True)
    assert torch.equal(merged.calibration.scores, whole.calibration.scores)


def test_random_numbers_are_not_those_that_divide_the_rows() -> None:
    # numpy: SeedSequence([seed, 0]) is SeedSequence(seed).
    divides = torch.from_numpy(np.random.default_rng(0).random(100))
    for stream in (classifiers._CALIBRATION, classifiers._PREDICTION):
        assert not torch.isin(ffcp.sets.uniforms(0, stream, 0, 100), divides).any()


def test_merging_nothing_itself_or_something_else() -> None:
    mine = ffcp.RAPS(network()).calibrate(X, Y)
    with pytest.raises(ValueError, match="has no calibration"):
        mine.merge(ffcp.RAPS(network(), seed=3))
    with pytest.raises(ValueError, match="merged with itself"):
        mine.merge(mine)
    with pytest.raises(TypeError, match="cannot merge a CP"):
        mine.merge(ffcp.CP(network()))


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("kind", [*METHODS, *TUNED])
def test_saved_and_loaded(kind: str, conditional: bool, tmp_path) -> None:
    make = {**METHODS, **TUNED}[kind]
    settings = {"class_conditional": conditional}
    predictor = make(network(), **settings).calibrate(X, Y)
    predictor.save(tmp_path / "sets.safetensors")
    loaded = make(network(), **settings).load(tmp_path / "sets.safetensors")
    copied = make(network(), **settings)
    copied.load_state_dict(predictor.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        expected = predictor.predict_set(X).mask
        for other in (loaded, copied):
            assert other.choice == predictor.choice
            assert other.classes == K
            assert torch.equal(other.predict_set(X).mask, expected)
            # Random numbers go on where the calibration left off.
            other.calibrate(X[:9], Y[:9], update=True)
    predictor.calibrate(X[:9], Y[:9], update=True)
    assert torch.equal(loaded.calibration.scores, predictor.calibration.scores)
    assert torch.equal(copied.calibration.scores, predictor.calibration.scores)


def test_loading_into_other_settings_is_refused_and_changes_nothing(tmp_path) -> None:
    path = tmp_path / "sets.safetensors"
    saved = ffcp.RAPS(network(), tune="size").calibrate(X, Y)
    saved.save(path)
    given = ffcp.RAPS(network(), lam=0.7, tune="size")
    with pytest.raises(ValueError, match=r"lam=.*\(here 0.7\)"):
        given.load(path)
    assert (given.kreg, given.choice, len(given.calibration)) == (None, None, 0)
    with pytest.raises(ValueError, match="method='RAPS'"):
        ffcp.APS(network()).load(path)
    other = network()
    nn.init.ones_(other[0].weight)
    with pytest.raises(ValueError, match="calibrated with other weights"):
        ffcp.RAPS(other, tune="size").load(path)
    with pytest.raises(ValueError, match="other settings"):
        ffcp.RAPS(network(), tune="size").load_state_dict(ffcp.RAPS(network()).state_dict() | {
            "_extra_state": ffcp.FFRAPS(network()).get_extra_state()
        })  # fmt: skip


def test_seeds_survive_saving(tmp_path) -> None:
    path = tmp_path / "sets.safetensors"
    ffcp.APS(network(), seed=4).calibrate(X, Y).save(path)
    loaded = ffcp.APS(network(), seed=5).load(path)
    with pytest.raises(ValueError, match="with seed 4"):
        loaded.merge(ffcp.APS(network(), seed=4).calibrate(X, Y))


def test_numpy_settings_can_be_saved(tmp_path) -> None:
    predictor = ffcp.RAPS(network(), lam=np.float32(0.25), kreg=np.int64(2)).calibrate(X, Y)
    predictor.save(tmp_path / "sets.safetensors")
    assert ffcp.RAPS(network(), lam=0.25, kreg=2).load(tmp_path / "sets.safetensors").kreg == 2


def test_repr_shows_settings_and_points() -> None:
    shown = repr(ffcp.RAPS(network(), lam=0.3).calibrate(X, Y))
    assert "lam=0.3, kreg=5" in shown
    assert "calibrated on 300 points" in shown


# -- bad input ---------------------------------------------------------------------------------


def test_probabilities_instead_of_logits() -> None:
    model = nn.Sequential(network(), nn.Softmax(dim=1))
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(ValueError, match=r"looks like probabilities.*torch\.log"):
            ffcp.RAPS(model.to(dtype)).calibrate(X.to(dtype), Y)
    ffcp.RAPS(nn.Sequential(network(), nn.LogSoftmax(dim=1))).calibrate(X, Y)
    ffcp.RAPS(nn.Sequential(network(), nn.ReLU())).calibrate(X, Y)  # nonnegative, but no sums


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_name_the_row(make, bad: float) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Identity())

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(self.inner(x) > 100, bad, x)

    x = normal(60, K, seed=1)
    x[41] = 1000
    model = nn.Sequential(Broken())
    for batch_size in (None, 10):
        with pytest.raises(ValueError, match=f"the prediction holds {bad} in row 41"):
            make(model, batch_size=batch_size).calibrate(x, Y[:60])
    predictor = make(model).calibrate(x[:40], Y[:40])
    for call in (predictor.predict_set, predictor.score_all):
        with pytest.raises(ValueError, match="in row 41"):
            call(x)


def test_bad_input_names_the_row(make) -> None:
    x = X.clone()
    x[17, 2] = math.nan
    with pytest.raises(ValueError, match="x holds nan in row 17"):
        make(network(), batch_size=8).calibrate(x, Y)


@pytest.mark.parametrize(
    ("y", "error", "message"),
    [
        (Y.float(), TypeError, r"integers.*got torch.float32.*y\.long\(\)"),
        (Y > 2, TypeError, "integers.*got torch.bool"),
        (Y + 1, ValueError, r"label 6 in row \d+ is out of range.*6 classes.*from 0 to 5"),
        (Y - 1, ValueError, r"label -1 in row \d+ is out of range"),
        (Y[:, None], ValueError, r"shape \(300, 1\), expected one integer per row: \(300,\)"),
        (nn.functional.one_hot(Y), ValueError, r"one-hot rows use y\.argmax"),
        (Y[:200], ValueError, r"x has 300 rows but the target has shape \(200,\)"),
        (np.array(["cat"] * 300), TypeError, "must be numbers"),
    ],
)
def test_bad_labels(y: object, error: type, message: str) -> None:
    predictor = ffcp.RAPS(network())
    with pytest.raises(error, match=message):
        predictor.calibrate(X, y)
    with pytest.raises(error, match=message):
        predictor.score(X, y)


def test_a_bad_label_in_a_loader_names_the_row_of_the_stream() -> None:
    y = Y.clone()
    y[211] = 99
    loader = DataLoader(TensorDataset(X, y), batch_size=50)
    predictor = ffcp.RAPS(network(), tune="size").calibrate(X, Y)
    before = (predictor.choice, predictor.calibration.scores, predictor._drawn)
    for update in (False, True):
        with pytest.raises(ValueError, match="label 99 in row 211"):
            predictor.calibrate(loader, update=update)
    assert before == (predictor.choice, predictor.calibration.scores, predictor._drawn)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 1), r"one class only.*torch\.cat"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), r"output has shape \(\d+,\).*\(n, K\)"),
        (nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3))), r"shape \(\d+, 2, 3\)"),
    ],
)
@pytest.mark.parametrize("gradient", [{}, {"gradient": "feature", "feature": "input"}])
def test_outputs_that_are_no_logits(model: nn.Module, message: str, gradient: dict) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FFRAPS(model, **gradient).calibrate(X, Y)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"delta": -0.1}, ValueError, "delta must be a number and not negative"),
        ({"delta": math.nan, "tune": "size"}, ValueError, "delta must be a number"),
        ({"lam": math.nan}, ValueError, "lam must be a number and not negative"),
        ({"kreg": 1.5}, TypeError, "kreg must be an integer"),
        ({"kreg": -1, "tune": "size"}, ValueError, "kreg must not be negative"),
        ({"temperature": "auto"}, ValueError, "temperature must be a positive number or 'fit'"),
        ({"temperature": -1.0}, ValueError, "temperature must be a positive number"),
        ({"temperature": None}, ValueError, "temperature must be a positive number"),
        ({"tune": "best"}, ValueError, "tune must be None, 'size' or 'coverage', got 'best'"),
        ({"tune": "size", "lam": 0, "kreg": 0, "delta": 0}, ValueError, "nothing to tune"),
        ({"tune_fraction": 1.0}, ValueError, "tune_fraction must lie between 0 and 1"),
        ({"tune_alpha": 0}, ValueError, "strictly between 0 and 1"),
        ({"seed": -1}, ValueError, "seed must be an integer and not negative"),
        ({"seed": 0.5}, ValueError, "seed must be an integer"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"gradient": "logit"}, ValueError, "gradient must be 'softmax' or 'feature'"),
        ({"gradient": "feature"}, ValueError, "needs a layer: give feature="),
        ({"gradient": "feature", "feature": "6x"}, ValueError, "no feature '6x'.*closest first: 6"),
        ({"gradient": "feature", "feature": "output"}, ValueError, "gradient='softmax'"),
        ({"feature": "0"}, ValueError, "has no part in gradient='softmax'"),
    ],
)
def test_settings_out_of_range(settings: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ffcp.FFRAPS(network(), **settings)


def test_a_feature_that_does_not_influence_the_top_probability() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, K), nn.Linear(4, K)

        def forward(self, x: Tensor) -> Tensor:
            self.b(x)
            return self.a(x)

    with pytest.raises(ValueError, match=r"does not influence|no gradient"):
        ffcp.FFRAPS(Unused(), gradient="feature", feature="b").calibrate(X, Y)


@pytest.mark.parametrize("alpha", [0, 1, math.nan, "0.1"])
def test_bad_alpha(make, alpha: object) -> None:
    predictor = make(network()).calibrate(X, Y)
    with pytest.raises((ValueError, TypeError), match="alpha must"):
        predictor.predict_set(X, alpha)


def test_predict_before_calibrate_and_nothing_at_all(make) -> None:
    predictor = make(network())
    with pytest.raises(RuntimeError, match="no calibration: call calibrate"):
        predictor.predict_set(X)
    for data in ((X[:0], Y[:0]), ([],)):
        with pytest.raises(ValueError, match="calibration data is empty"):
            predictor.calibrate(*data)
    predictor.calibrate(X, Y)
    for update in (False, True):
        with pytest.raises(ValueError, match="calibration data is empty"):
            predictor.calibrate([], update=update)
    for call in (lambda: predictor.predict_set(X[:0]), lambda: predictor.score(X[:0], Y[:0])):
        with pytest.raises(ValueError, match="x has no rows"):
            call()
    with pytest.raises(ValueError, match="first_row counts from 0, got -1"):
        predictor.predict_set(X, first_row=-1)
    with pytest.raises(TypeError, match="needs the labels"):
        predictor.score(X, None)


def test_too_few_rows_to_tune_and_calibrate() -> None:
    with pytest.raises(ValueError, match="1 rows cannot be divided"):
        ffcp.RAPS(network(), tune="size", seed=1).calibrate(X[:1], Y[:1])


def test_another_number_of_classes_than_at_calibration() -> None:
    predictor = ffcp.RAPS(network()).calibrate(X, Y)
    predictor.model = network(7)
    with pytest.raises(ValueError, match="calibrated on 6 classes, but the model now gives 7"):
        predictor.predict_set(X)
    with pytest.raises(ValueError, match="calibrated on 6 classes"):
        predictor.calibrate(X, Y, update=True)


def test_a_model_that_mixes_rows_is_refused(make) -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.Linear(4, K))

        def forward(self, x: Tensor) -> Tensor:
            v = self.get_submodule("0")(x)
            return v - v.mean(dim=0)

    with pytest.raises(ValueError, match="the model mixes rows"):
        make(Mixes()).calibrate(X, Y)


def test_model_that_is_no_module() -> None:
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got function"):
        ffcp.APS(lambda x: x)
