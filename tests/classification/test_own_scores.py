"""Label sets put together by hand: one's own score, and every calibration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import conformal_quantile, conformal_rank
from tests.classification.material import K, X, Y, network
from tests.conftest import normal
from tests.core import config
from tests.law import ERROR_RATE, draw_hits, p_value, upper_p_value

N, T, ALPHA, REPEATS = 40, 30, 0.1, 250
LOGITS = 2 * normal(300, K, seed=4)


def margin(seen: ffcp.BatchOutput) -> Tensor:
    """How far a logit lies below the largest one."""
    return seen.output.amax(dim=1, keepdim=True) - seen.output


def side(x: Tensor) -> list[bool]:
    return (x[:, 0] > 0).tolist()


def sample(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    logits = 2 * torch.randn(rows, 4, generator=generator)
    p = (0.6 * logits + torch.randn(rows, 4, generator=generator)).softmax(dim=1)
    return logits, torch.multinomial(p, 1, generator=generator)[:, 0]


# -- one's own score ---------------------------------------------------------------------------


def test_a_function_is_a_score() -> None:
    predictor = ffcp.SetPredictor(network(), score=margin).calibrate(X[:200], Y[:200])
    with torch.no_grad():
        logits = network().eval()(X)
    scores = (logits.amax(dim=1, keepdim=True) - logits).double()
    torch.testing.assert_close(predictor.score_all(X, first_row=0), scores, rtol=0, atol=1e-5)
    assert torch.equal(
        predictor.score(X, Y, first_row=0),
        predictor.score_all(X, first_row=0).gather(1, Y[:, None])[:, 0],
    )
    level = conformal_quantile(predictor.score(X[:200], Y[:200], first_row=0), 0.2)
    sets = predictor.predict_set(X[200:], 0.2, first_row=0)
    assert torch.equal(sets.mask, predictor.score_all(X[200:], first_row=0) <= level)
    for row, labels in enumerate(sets.labels):
        assert sorted(labels.tolist()) == sets.mask[row].nonzero()[:, 0].tolist()
        assert (scores[200 + row, labels].diff() >= 0).all()


@pytest.mark.long
def test_coverage_of_a_score_of_ones_own_follows_the_law() -> None:
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = ffcp.SetPredictor(nn.Identity(), margin_or_noise, allow_zero_sets=True)
        return (
            predictor.calibrate(x_cal, y_cal)
            .predict_set(x, ALPHA, first_row=0)
            .mask.gather(1, y[:, None])[:, 0]
        )

    def margin_or_noise(seen: ffcp.BatchOutput) -> Tensor:
        return seen.output.logsumexp(dim=1, keepdim=True) - seen.output  # no ties

    hits = draw_hits(sample, covered, n=N, t=T, repeats=REPEATS)
    assert p_value(hits, T, N, conformal_rank(N, ALPHA)) > ERROR_RATE


def test_a_score_that_looks_at_layers() -> None:
    def by_gradient(seen: ffcp.BatchOutput) -> Tensor:
        return -seen.output / seen.norms["0"] + 0 * seen.values["3"].sum(dim=1, keepdim=True)

    score = ffcp.scores.FunctionScore(by_gradient, norms=["0"], values=["3"], name="by gradient")
    predictor = ffcp.SetPredictor(network(), score).calibrate(X, Y)
    prediction, norms = ffcp.gradient_norms(network(), X, ["0"])
    torch.testing.assert_close(
        predictor.score_all(X, first_row=0),
        (-prediction / norms["0"]).double(),
        rtol=1e-4,
        atol=1e-4,
    )
    assert "by gradient" in repr(predictor)
    assert 0.85 < float(predictor.predict_set(X, first_row=0).coverage(Y)) < 1


def test_a_class_is_a_score_too() -> None:
    class Likelihood(ffcp.scores.LabelScore):
        def of_all(self, seen: ffcp.BatchOutput) -> Tensor:
            return -seen.output.log_softmax(dim=1)

    own = ffcp.SetPredictor(nn.Identity(), Likelihood()).calibrate(LOGITS, Y)
    lac = ffcp.LAC(nn.Identity()).calibrate(LOGITS, Y)  # the same order of labels over all rows
    assert torch.equal(
        own.predict_set(LOGITS, 0.2, first_row=0).mask,
        lac.predict_set(LOGITS, 0.2, first_row=0).mask,
    )


def test_a_score_of_probabilities() -> None:
    # Only the library's own scores start from logits; what a user's does is the user's affair.
    model = nn.Sequential(nn.Identity(), nn.Softmax(dim=1))
    own = ffcp.SetPredictor(model, lambda seen: 1 - seen.output).calibrate(LOGITS.double(), Y)
    lac = ffcp.LAC(nn.Identity()).calibrate(LOGITS.double(), Y)
    assert torch.equal(
        own.predict_set(LOGITS.double(), 0.2, first_row=0).mask,
        lac.predict_set(LOGITS.double(), 0.2, first_row=0).mask,
    )
    with pytest.raises(ValueError, match="probabilities"):
        ffcp.SetPredictor(model, ffcp.scores.LAC()).calibrate(LOGITS, Y)


def test_infinite_scores_keep_labels_out_and_in_order() -> None:
    def never_the_first(seen: ffcp.BatchOutput) -> Tensor:
        return margin(seen).index_fill(1, torch.tensor([0]), math.inf)

    y = 1 + Y % (K - 1)
    sets = (
        ffcp.SetPredictor(nn.Identity(), never_the_first)
        .calibrate(LOGITS, y)
        .predict_set(LOGITS, first_row=0)
    )
    assert not sets.mask[:, 0].any()
    for row, labels in enumerate(sets.labels):
        assert (margin_of(row)[labels].diff() >= 0).all()
    half = torch.where(torch.arange(300) % 2 == 0, 0, y)
    lost = ffcp.SetPredictor(nn.Identity(), never_the_first).calibrate(LOGITS, half)
    with pytest.warns(ffcp.FFCPWarning, match=r"\b150\b"):
        assert lost.predict_set(LOGITS, first_row=0).mask.all()


def margin_of(row: int) -> Tensor:
    return LOGITS[row].max() - LOGITS[row]


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda seen: seen.output[:, :2],
            "shape",
        ),
        (lambda seen: seen.output * math.nan, "NaN"),
        (lambda seen: 1.0, "shape"),
    ],
)
def test_scores_that_cannot_be_meant(score, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.SetPredictor(network(), score).calibrate(X, Y)


def test_what_is_no_score() -> None:
    with pytest.raises(TypeError, match=r"\b3\b"):
        ffcp.SetPredictor(network(), 3)
    with pytest.raises(ValueError, match="'7'"):
        ffcp.SetPredictor(network(), ffcp.scores.FunctionScore(margin, norms=["7"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient": "feature"}, "feature"),
        ({"feature": "0"}, "gradient"),
        ({"gradient": "feature", "feature": "output"}, "layer"),
        ({"gradient": "logit"}, "gradient"),
    ],
)
def test_a_layer_that_ffraps_cannot_use(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.scores.FFRAPS(**settings)


NAMED = {
    "LAC": (ffcp.LAC, ffcp.scores.LAC, {}),
    "APS": (ffcp.APS, ffcp.scores.APS, {}),
    "RAPS": (ffcp.RAPS, ffcp.scores.RAPS, {"lam": 0.1}),
    "RAPS tuned": (ffcp.RAPS, ffcp.scores.RAPS, {"tune": "size"}),
    "FFRAPS": (
        ffcp.FFRAPS,
        ffcp.scores.FFRAPS,
        {"delta": 0.2, "gradient": "feature", "feature": "0"},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_method_is_a_name_for_its_pieces(name: str) -> None:
    method, score, settings = NAMED[name]
    named = method(network(), seed=0, **settings).calibrate(X, Y)
    by_hand = ffcp.SetPredictor(
        network(), score(**settings), ffcp.calibrations.Marginal(), seed=0
    ).calibrate(X, Y)
    assert config(named) == config(by_hand)
    assert torch.equal(
        named.predict_set(X, first_row=0).mask, by_hand.predict_set(X, first_row=0).mask
    )
    assert torch.equal(named.calibration.scores, by_hand.calibration.scores)


# -- every calibration -------------------------------------------------------------------------


def test_mondrian_by_a_function_is_groups_by_that_function() -> None:
    pieces = ffcp.SetPredictor(network(), margin, ffcp.calibrations.Mondrian(by=side)).calibrate(
        X, Y
    )
    groups = ffcp.SetPredictor(network(), margin).calibrate(X, Y, groups=side)
    assert torch.equal(
        pieces.predict_set(X, first_row=0).mask,
        groups.predict_set(X, groups=side(X), first_row=0).mask,
    )
    assert not torch.equal(
        pieces.predict_set(X, first_row=0).mask,
        ffcp.SetPredictor(network(), margin).calibrate(X, Y).predict_set(X, first_row=0).mask,
    )
    for call in (
        lambda: pieces.predict_set(X, groups=side(X), first_row=0),
        lambda: pieces.calibrate(X, Y, groups=side),
    ):
        with pytest.raises(ValueError, match="groups"):
            call()


def test_mondrian_saves_which_function_it_was(tmp_path) -> None:
    path = tmp_path / "sets.safetensors"
    predictor = ffcp.SetPredictor(network(), margin, ffcp.calibrations.Mondrian(by=side)).calibrate(
        X, Y
    )
    predictor.save(path)
    loaded = ffcp.SetPredictor(network(), margin, ffcp.calibrations.Mondrian(by=side)).load(path)
    assert torch.equal(
        loaded.predict_set(X, first_row=0).mask, predictor.predict_set(X, first_row=0).mask
    )
    with pytest.raises(ValueError, match="side"):
        ffcp.SetPredictor(network(), margin).load(path)


def test_by_label_has_a_threshold_for_each_class() -> None:
    y = torch.arange(300) % K
    predictor = ffcp.SetPredictor(nn.Identity(), margin, ffcp.calibrations.ByLabel()).calibrate(
        LOGITS, y
    )
    own = predictor.score(LOGITS, y, first_row=0)
    levels = torch.stack([conformal_quantile(own[y == label], 0.2) for label in range(K)])
    scores = predictor.score_all(LOGITS, first_row=0)
    expected = scores <= levels
    expected[~expected.any(dim=1), scores[~expected.any(dim=1)].argmin(dim=1)] = True
    assert torch.equal(predictor.predict_set(LOGITS, 0.2, first_row=0).mask, expected)


@pytest.mark.parametrize("guarantee", ["marginal", "random", "none"])
def test_local_thresholds_differ_from_row_to_row(guarantee: str) -> None:
    local = ffcp.calibrations.Local(
        ffcp.kernels.Localizer("gaussian", on="input", bandwidth=2.0), guarantee=guarantee
    )
    predictor = ffcp.SetPredictor(network(), margin, local, allow_zero_sets=True).calibrate(X, Y)
    sets, scores = predictor.predict_set(X, 0.2, first_row=0), predictor.score_all(X, first_row=0)
    # The labels in a set are those with the smallest scores, but up to another level in each row.
    largest = scores.masked_fill(~sets.mask, -math.inf).amax(dim=1)
    smallest = scores.masked_fill(sets.mask, math.inf).amin(dim=1)
    assert (largest < smallest).all()
    assert largest.max() > smallest.min()
    assert float(sets.coverage(Y)) > 0.75


def test_near_points_decide() -> None:
    # Labels are sure on the left and random on the right: sets are small and large.
    x = torch.linspace(-1, 1, 400)[:, None]
    y = torch.where(x[:, 0] < 0, 0, torch.arange(400) % 3)

    class Sure(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([2 + 0 * x, 0.01 * x, 0.02 * x], dim=1)

    local = ffcp.calibrations.Local(ffcp.kernels.Localizer("nearest", on="input", bandwidth=40))
    sizes = (
        ffcp.SetPredictor(Sure(), margin, local).calibrate(x, y).predict_set(x, first_row=0).sizes
    )
    assert (sizes[:150] == 1).all()
    assert (sizes[250:] == 3).all()


CALIBRATIONS = {
    "Mondrian": lambda: ffcp.calibrations.Mondrian(by=side),
    "ByLabel": ffcp.calibrations.ByLabel,
    "Local": lambda: ffcp.calibrations.Local(ffcp.kernels.Localizer("nearest", bandwidth=20)),
    "Local, random": lambda: ffcp.calibrations.Local(
        ffcp.kernels.Localizer("gaussian", bandwidth=8.0), guarantee="random"
    ),
    "Local by groups": lambda: ffcp.calibrations.Mondrian(
        ffcp.calibrations.Local(ffcp.kernels.Localizer("gaussian", bandwidth=3.0)), by=side
    ),
}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")  # few points: some sets hold all labels
@pytest.mark.parametrize("name", CALIBRATIONS)
@pytest.mark.parametrize("score", [margin, ffcp.scores.APS()], ids=["own", "APS"])
def test_every_calibration_covers_with_every_score(name: str, score: object) -> None:
    seeds = itertools.count()

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = ffcp.SetPredictor(
            nn.Identity(), score, CALIBRATIONS[name](), allow_zero_sets=True, seed=next(seeds)
        )
        return (
            predictor.calibrate(x_cal, y_cal)
            .predict_set(x, ALPHA, first_row=0)
            .mask.gather(1, y[:, None])[:, 0]
        )

    hits = draw_hits(sample, covered, n=80, t=T, repeats=150)
    assert hits.mean() / T > 1 - ALPHA - 4 * hits.std() / math.sqrt(len(hits)) / T


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_the_batch_size_changes_nothing(name: str) -> None:
    y = torch.arange(300) % K
    masks = [
        ffcp.SetPredictor(nn.Identity(), margin, CALIBRATIONS[name](), batch_size=size)
        .calibrate(LOGITS, y)
        .predict_set(LOGITS, 0.3, first_row=0)
        .mask
        for size in (None, 11)
    ]
    assert torch.equal(*masks)


def test_score_and_bandwidth_can_both_be_left_open() -> None:
    predictor = ffcp.SetPredictor(
        network(), ffcp.scores.RAPS(tune="size"), ffcp.calibrations.Local("gaussian")
    )
    predictor.calibrate(X, Y)
    assert predictor.choice.rows == 60
    assert len(predictor.calibration) == 240
    assert float(predictor.predict_set(X, first_row=0).coverage(Y)) > 0.8


def test_too_few_points_around_a_row_are_warned_of() -> None:
    local = ffcp.calibrations.Local(
        ffcp.kernels.Localizer("box", on="input", bandwidth=0.05), guarantee="none"
    )
    predictor = ffcp.SetPredictor(nn.Identity(), margin, local, batch_size=50).calibrate(LOGITS, Y)
    with pytest.warns(ffcp.FFCPWarning, match="labels"):
        assert predictor.predict_set(LOGITS, first_row=0).mask.all()


# -- merging -----------------------------------------------------------------------------------


def test_a_score_of_ones_own_merges_by_its_name() -> None:
    mine = ffcp.SetPredictor(network(), margin).calibrate(X[:100], Y[:100])
    mine.merge(ffcp.SetPredictor(network(), margin).calibrate(X[100:], Y[100:]))
    assert len(mine.calibration) == 300
    with pytest.raises(ValueError, match="margin"):
        mine.merge(ffcp.SetPredictor(network(), lambda seen: -seen.output).calibrate(X, Y))


@pytest.mark.long
def test_by_label_every_class_is_covered() -> None:
    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        predictor = ffcp.SetPredictor(
            nn.Identity(), margin, ffcp.calibrations.ByLabel(), allow_zero_sets=True
        )
        sets = predictor.calibrate(x_cal, y_cal).predict_set(x, ALPHA, first_row=0)
        return sets.mask.gather(1, y[:, None]).view(-1, 2)

    def in_turn(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(rows) % 2
        logits = torch.randn(rows, 2, generator=generator)
        return logits + torch.tensor([3.0, 0.3])[y, None] * nn.functional.one_hot(y, 2), y

    hits = draw_hits(in_turn, covered, n=40, t=20, repeats=REPEATS)
    for label in range(2):  # the margin of the best label is always 0: ties
        assert upper_p_value(hits[:, label], 10, 20, conformal_rank(20, ALPHA)) > ERROR_RATE
