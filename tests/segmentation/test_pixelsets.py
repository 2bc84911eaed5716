"""Label sets for pixels as a user meets them."""

from __future__ import annotations

import copy
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.conformal.rank import conformal_quantile
from ffcp.segmentation import DoubleLog, PixelSet, PixelSets, double_log, pixel_coverage
from ffcp.segmentation import pixel_sets as pixel_predictor
from ffcp.segmentation.counts import BINS, EDGES, PixelCounts, to_bins
from tests.conftest import normal
from tests.segmentation.material import CLASSES, IGNORE, SIDE, X, Y, holed, network, pool, scenes

# -- thresholds, exactly -----------------------------------------------------------------------


def exact_risk_bin(counts: Tensor, alpha: Fraction) -> int:
    for t in range(BINS):
        losses = [Fraction(int(row[t + 1 :].sum()), int(row.sum())) for row in counts]
        if (sum(losses) + 1) / (len(counts) + 1) <= alpha:
            return t
    return BINS - 1


@pytest.mark.parametrize("seed", range(6))
def test_risk_bin_is_that_of_fractions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(12, BINS, dtype=torch.int32)
    counts[:, :40] = torch.randint(0, 3, (12, 40), generator=generator)
    counts[:, 0] += 1
    store = PixelCounts().fit(counts)
    for alpha in (0.1, 0.2, 0.35):
        assert store.risk_bin(alpha) == exact_risk_bin(counts, Fraction(str(alpha)))


def test_a_risk_that_meets_alpha_exactly_is_enough() -> None:
    # Losses of 1/3, 1/7 and 11/21 beyond bin 4 add up to 1, which floating point misses.
    counts = torch.zeros(9, BINS, dtype=torch.int32)
    counts[:, 4] = 1
    for row, (part, whole) in enumerate([(1, 3), (1, 7), (11, 21)]):
        counts[row, 4], counts[row, 9] = whole - part, part
    store = PixelCounts().fit(counts)
    assert store.risk_bin(0.2) == 4
    assert store.risk_bin(Fraction(2, 10) - Fraction(1, 10**15)) == 9


@pytest.mark.long
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 1, Fraction(1, 3)])
def test_image_bins_count_exactly(share: float) -> None:
    exact = Fraction(str(share))
    store = PixelCounts().fit(pool()[:40])
    for bins, row in zip(store.image_bins(share).tolist(), pool()[:40], strict=True):
        within = row.cumsum(0)
        assert int(within[bins]) >= exact * int(within[-1])
        assert bins == 0 or int(within[bins - 1]) < exact * int(within[-1])


def test_share_of_seven_tenths_of_ten_pixels_is_seven() -> None:
    # In floating point 0.7 * 10 is 7 but 0.07 * 100 is 7.000000000000001.
    counts = torch.zeros(1, BINS, dtype=torch.int32)
    counts[0, :100] = 1
    store = PixelCounts().fit(counts)
    assert store.image_bins(0.07).tolist() == [6]


def test_bins_round_up_and_cover_all_scores() -> None:
    scores = torch.cat([EDGES, EDGES * 1.001, torch.tensor([math.inf], dtype=torch.float64)])
    bins = to_bins(scores)
    assert bins.min() == 0
    assert bins.max() == BINS - 1
    inside = bins < BINS - 1
    upper = EDGES[bins[inside].long()]
    assert (upper >= scores[inside]).all()
    positive = scores[inside] >= EDGES[1]
    assert (upper[positive] <= scores[inside][positive] * 2 ** (1 / 128)).all()
    assert (EDGES[1:].diff() > 0).all()


# -- scores and sets ---------------------------------------------------------------------------


def by_hand(model: nn.Module, x: Tensor, feature_then_head=None, smallest: float = 0.01) -> Tensor:
    """Scores of all labels, from probabilities and one backward pass per output."""
    with torch.no_grad():
        p = model.double()(x.double()).softmax(dim=1)
    f = p.log().neg().log()
    scale = torch.ones_like(f)
    if feature_then_head is not None:
        before, head = feature_then_head
        for i, v in enumerate(before(x.double()).detach()):
            rows = torch.autograd.functional.jacobian(
                lambda v: head(v[None]).softmax(dim=1).log().neg().log()[0], v
            )
            scale[i] = rows.flatten(3).norm(dim=3).clamp_min(1e-6)
    scores = (f - double_log(torch.tensor(1 - smallest, dtype=torch.float64))).clamp_min(0) / scale
    return scores.scatter(1, f.argmin(dim=1, keepdim=True), 0.0)


@pytest.mark.long
@pytest.mark.parametrize("feature", ["output", "0"])
@pytest.mark.parametrize("method", ["auto", "exact"])
def test_scores_are_those_by_hand(feature: str, method: str) -> None:
    model = network().double()
    parts = None if feature == "output" else (model[:1], model[1:])
    x = normal(4, 1, SIDE, SIDE, seed=4).double()  # of a contrast at which log(-log p) is exact
    expected = by_hand(copy.deepcopy(model), x, parts)
    predictor = PixelSets(model, feature, method=method)
    for label in range(CLASSES):
        scores = predictor.score(x, torch.full((4, SIDE, SIDE), label))
        torch.testing.assert_close(scores, expected[:, label])


@pytest.mark.parametrize("feature", ["output", "0"])
@pytest.mark.parametrize("share", [None, 0.8, 1])
def test_a_label_is_in_the_set_if_its_bin_is_within_the_threshold(
    feature: str, share: float | None
) -> None:
    predictor = PixelSets(network(), feature).calibrate(X[:40], Y[:40])
    sets = predictor.predict_set(X[40:], 0.2, share=share)
    store = predictor.calibration
    t = store.risk_bin(0.2) if share is None else store.share_bin(0.2, share)
    assert 0 < t < BINS - 1
    for label in range(CLASSES):
        scores = predictor.score(X[40:], torch.full_like(Y[40:], label))
        assert torch.equal(sets.mask[:, label], to_bins(scores) <= t)
        assert (scores[sets.prediction == label] == 0).all()
    # The threshold leaves something out, or the test says nothing.
    assert 0 < sets.mask.double().mean() < 1


def test_a_score_on_the_edge_of_the_threshold_is_within() -> None:
    certain = math.log(-math.log1p(-0.01))
    f = torch.full((20, 2, 1, 1), certain, dtype=torch.float64)
    f[:, 1] += 1.0  # exact: the score of label 1 is 1, which is an edge
    predictor = PixelSets(nn.Identity(), outputs="double_log")
    predictor.calibrate(f, torch.ones(20, 1, 1).long())
    assert EDGES[predictor.calibration.risk_bin(0.1)] == 1.0
    assert predictor.predict_set(f, 0.1).mask.all()


def test_counts_are_those_of_the_scores() -> None:
    predictor = PixelSets(network(), "0", ignore=IGNORE)
    y = holed(Y)
    predictor.calibrate(X, y)
    scores = predictor.score(X, y)
    assert torch.equal(scores.isnan(), y == IGNORE)
    for counts, row in zip(predictor.calibration.scores, scores, strict=True):
        expected = to_bins(row[~row.isnan()]).bincount(minlength=BINS)
        assert torch.equal(counts.long(), expected)


@pytest.mark.parametrize("feature", ["output", "0", "2"])
@pytest.mark.parametrize("share", [None, 0.7, 1])
def test_sets_are_nested_in_alpha_and_never_empty(feature: str, share: float | None) -> None:
    predictor = PixelSets(network(), feature).calibrate(X[:40], Y[:40])
    before = None
    for alpha in (0.05, 0.1, 0.2, 0.5, Fraction(9, 10), Fraction(99, 100)):
        sets = predictor.predict_set(X[40:], alpha, share=share)
        assert sets.mask.gather(1, sets.prediction[:, None]).all()
        assert before is None or not (sets.mask & ~before).any()
        before = sets.mask


def test_a_larger_share_gives_larger_sets() -> None:
    predictor = PixelSets(network(), "0").calibrate(X[:40], Y[:40])
    half, whole = (predictor.predict_set(X[40:], 0.1, share=s).mask for s in (0.5, 1))
    assert not (half & ~whole).any()
    assert whole.sum() > half.sum()


def test_the_most_likely_label_of_equal_ones_is_the_first() -> None:
    predictor = PixelSets(nn.Identity()).calibrate(
        torch.zeros(20, 3, 2, 2), torch.zeros(20, 2, 2).long()
    )
    sets = predictor.predict_set(torch.zeros(1, 3, 2, 2), 0.1)
    assert (sets.prediction == 0).all()
    assert (sets.size == 1).all()


def test_a_network_of_double_logs_gives_the_same_sets() -> None:
    logits = network()
    numbers = nn.Sequential(*logits, DoubleLog())
    a = PixelSets(logits, "0").calibrate(X[:40], Y[:40])
    b = PixelSets(numbers, "0", outputs="double_log").calibrate(X[:40], Y[:40])
    assert torch.equal(a.calibration.scores, b.calibration.scores)
    assert torch.equal(a.predict_set(X[40:]).mask, b.predict_set(X[40:]).mask)


def test_features_are_named_as_in_the_users_model() -> None:
    model = nn.Sequential()
    model.add_module("input", nn.Conv2d(1, 4, 3, padding=1))  # a name that means another thing
    model.add_module("head", nn.Sequential(nn.ReLU(), nn.Conv2d(4, CLASSES, 1)))
    y = Y[:2]
    by_module = PixelSets(model, model[0]).score(X[:2], y)
    assert torch.equal(by_module, PixelSets(model, ".input").score(X[:2], y))
    assert not torch.equal(by_module, PixelSets(model, "input").score(X[:2], y))
    assert PixelSets(model, "head.0").feature == "head.0"
    with pytest.raises(ValueError, match="heat"):
        PixelSets(model, "heat")


# -- calibration in pieces ---------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("feature", ["output", "0"])
def test_the_batch_size_does_not_matter(feature: str) -> None:
    model, x = network().double(), X.double()
    whole = PixelSets(model, feature).calibrate(x[:40], Y[:40])
    expected = whole.predict_set(x[40:], 0.2)
    for size in (1, 7):
        parts = PixelSets(model, feature, batch_size=size).calibrate(x[:40], Y[:40])
        assert torch.equal(parts.calibration.scores, whole.calibration.scores)
        sets = parts.predict_set(x[40:], 0.2)
        assert torch.equal(sets.mask, expected.mask)
        assert torch.equal(sets.prediction, expected.prediction)


def test_large_batches_are_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = PixelSets(network(), "0").calibrate(X[:40], Y[:40])
    expected = predictor.predict_set(X[40:], 0.2).mask
    monkeypatch.setattr(pixel_predictor, "_BLOCK", 40)
    assert torch.equal(predictor.predict_set(X[40:], 0.2).mask, expected)
    again = PixelSets(network(), "0").calibrate(X[:40], Y[:40])
    assert torch.equal(again.calibration.scores, predictor.calibration.scores)
    assert torch.equal(again.calibration.image_bins(0.9), predictor.calibration.image_bins(0.9))


def test_a_loader_of_different_sizes() -> None:
    batches = [scenes(rows, seed=rows, side=side) for rows, side in ((5, 4), (8, 6), (3, 9))]
    predictor = PixelSets(network(), "0").calibrate(batches)
    assert predictor.calibration.scores.sum(dim=1).tolist() == [16] * 5 + [36] * 8 + [81] * 3
    one_by_one = PixelSets(network(), "0")
    for x, y in batches:
        one_by_one.calibrate(x, y, update=True)
    assert torch.equal(one_by_one.calibration.scores, predictor.calibration.scores)
    for side in (3, 10):
        sets = predictor.predict_set(scenes(2, side=side)[0], 0.2)
        assert sets.size.shape == (2, side, side)


@pytest.mark.long
def test_merge_save_and_load_equal_one_calibration(tmp_path) -> None:
    def make() -> PixelSets:
        return PixelSets(network(), "0", ignore=IGNORE)

    y = holed(Y)
    whole = make().calibrate(X[:40], y[:40])
    merged = make().calibrate(X[:15], y[:15]).merge(make().calibrate(X[15:40], y[15:40]))
    assert torch.equal(merged.calibration.scores, whole.calibration.scores)
    merged.save(tmp_path / "sets.safetensors")
    loaded = make().load(tmp_path / "sets.safetensors")
    assert loaded.calibration.scores.dtype == torch.int32
    by_state = make()
    by_state.load_state_dict(whole.state_dict())
    for other in (merged, loaded, by_state):
        for share in (None, 0.9):
            expected = whole.predict_set(X[40:], 0.2, share=share).mask
            assert torch.equal(other.predict_set(X[40:], 0.2, share=share).mask, expected)


def test_the_calibration_stays_as_it_is_when_the_model_moves() -> None:
    predictor = PixelSets(network()).calibrate(X, Y)
    before = predictor.calibration.scores.clone()
    predictor.to(torch.bfloat16)
    assert predictor.calibration.scores.dtype == torch.int32
    assert torch.equal(predictor.calibration.scores, before)
    with pytest.raises(RuntimeError, match="weights"):
        predictor.predict_set(X.bfloat16(), 0.2)
    predictor.calibrate(X.bfloat16(), Y)
    assert predictor.calibration.scores.dtype == torch.int32
    assert predictor.predict_set(X.bfloat16(), 0.2).mask.any(dim=1).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "other",
    [
        {"feature": "output"},
        {"smallest": 0.02},
        {"ignore": 3},
        {"floor": 1e-3},
        {"norm": 1},
        {"method": "coloured"},
    ],
)
def test_other_settings_are_refused(other: dict, tmp_path) -> None:
    given = {"feature": "0", "ignore": 4, "method": "exact"}
    mine = PixelSets(network(), **given).calibrate(X, Y)
    theirs = PixelSets(network(), **{**given, **other}).calibrate(X, Y)
    with pytest.raises(ValueError, match="settings"):
        mine.merge(theirs)
    theirs.save(tmp_path / "theirs.safetensors")
    with pytest.raises(ValueError, match="settings"):
        mine.load(tmp_path / "theirs.safetensors")


def test_a_label_to_ignore_comes_with_the_file(tmp_path) -> None:
    y = holed(Y)
    PixelSets(network(), ignore=IGNORE).calibrate(X, y).save(tmp_path / "sets")
    loaded = PixelSets(network()).load(tmp_path / "sets")
    assert loaded.score(X, y).isnan().equal(y == IGNORE)


def test_merge_refuses_what_it_cannot_add() -> None:
    predictor = PixelSets(network()).calibrate(X, Y)
    with pytest.raises(ValueError, match="itself"):
        predictor.merge(predictor)
    with pytest.raises(ValueError, match="calibrate"):
        predictor.merge(PixelSets(network()))
    with pytest.raises(TypeError, match="Conv2d"):
        predictor.merge(nn.Conv2d(1, 1, 1))


def test_ignored_pixels_do_not_count() -> None:
    y = holed(Y)
    predictor = PixelSets(network(), ignore=IGNORE).calibrate(X, y)
    assert torch.equal(predictor.calibration.scores.sum(dim=1), (y != IGNORE).sum(dim=(1, 2)))
    # Whatever the label of an ignored pixel might have been.
    zeros = PixelSets(network(), ignore=-1).calibrate(X, y.where(y != IGNORE, -1))
    assert torch.equal(zeros.calibration.scores, predictor.calibration.scores)


def test_images_without_labels_are_left_out() -> None:
    y = Y.clone()
    y[[3, 17]] = IGNORE
    predictor = PixelSets(network(), ignore=IGNORE)
    with pytest.warns(ffcp.FFCPWarning, match="2 of 60"):
        predictor.calibrate(X, y)
    assert len(predictor.calibration) == 58
    kept = [i for i in range(60) if i not in (3, 17)]
    expected = PixelSets(network()).calibrate(X[kept], Y[kept])
    assert torch.equal(predictor.calibration.scores, expected.calibration.scores)
    shares = predictor.predict_set(X, 0.2).coverage(y, IGNORE)
    assert torch.equal(shares.isnan(), (y == IGNORE).all(dim=2).all(dim=1))
    with pytest.raises(ValueError, match="empty"):
        predictor.calibrate(X[:2], torch.full_like(y[:2], IGNORE))
    assert len(predictor.calibration) == 58


# -- too little to say -------------------------------------------------------------------------


@pytest.mark.parametrize("share", [None, 0.9, 1])
def test_too_few_images_give_all_labels_and_a_warning(share: float | None) -> None:
    predictor = PixelSets(network(), "0").calibrate(X[:8], Y[:8])
    with pytest.warns(ffcp.FFCPWarning, match="9"):
        sets = predictor.predict_set(X[8:], 0.1, share=share)
    assert sets.mask.all()
    predictor.calibrate(X[8:9], Y[8:9], update=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ffcp.FFCPWarning)
        predictor.predict_set(X[9:], 0.1, share=share)


def test_scores_beyond_the_grid_give_all_labels_and_a_warning() -> None:
    # Where the feature is dead the scale is the floor.
    model = network()
    model[1] = nn.ReLU()
    with torch.no_grad():
        model[0].bias.fill_(-1e6)
    y = torch.full_like(Y, 2 if model[2].bias.argmax() != 2 else 1)
    predictor = PixelSets(model, "0", floor=1e-9).calibrate(X, y)
    with pytest.warns(ffcp.FFCPWarning, match="floor"):
        assert predictor.predict_set(X, 0.1).mask.all()
    assert PixelSets(model, "0").calibrate(X, y).calibration.risk_bin(0.1) < BINS - 1


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0, 1, -0.1, math.nan])
def test_alpha_outside_the_open_interval(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        PixelSets(network()).calibrate(X, Y).predict_set(X, alpha)


@pytest.mark.parametrize("share", [0, -0.5, 1.1, math.nan])
def test_share_outside_its_range(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        PixelSets(network()).calibrate(X[:5], Y[:5]).predict_set(X, share=share)


@pytest.mark.parametrize("share", [True, "0.9", [0.9]])
def test_share_that_is_no_number(share: object) -> None:
    with pytest.raises(TypeError, match="share"):
        PixelSets(network()).calibrate(X, Y).predict_set(X, share=share)


def test_nothing_there() -> None:
    predictor = PixelSets(network())
    with pytest.raises(RuntimeError, match="calibrate"):
        predictor.predict_set(X)
    with pytest.raises(ValueError, match="empty"):
        predictor.calibrate(X[:0], Y[:0])
    with pytest.raises(ValueError, match="empty"):
        predictor.calibrate([])
    predictor.calibrate(X, Y)
    with pytest.raises(ValueError, match="x"):
        predictor.predict_set(X[:0])
    with pytest.raises(ValueError, match="x"):
        predictor.score(X[:0], Y[:0])
    with pytest.raises(TypeError, match="targets"):
        predictor.score(X, None)


@pytest.mark.parametrize("loader", [False, True])
def test_labels_outside_the_classes_name_the_first_image(loader: bool) -> None:
    y = Y.clone()
    y[23, 1, 1], y[40, 0, 0] = 7, -2
    data = ([(X[:20], y[:20]), (X[20:], y[20:])],) if loader else (X, y)
    with pytest.raises(ValueError, match="image 23"):
        PixelSets(network(), batch_size=None if loader else 8).calibrate(*data)
    with pytest.raises(ValueError, match="or 7"):
        PixelSets(network(), ignore=7).calibrate(*data)


def test_a_failed_calibration_leaves_the_old_one() -> None:
    predictor = PixelSets(network()).calibrate(X, Y)
    with pytest.raises(ValueError, match="labels"):
        predictor.calibrate([(X[:20], Y[:20]), (X[20:], Y[20:] + 3)])
    assert len(predictor.calibration) == 60


@pytest.mark.parametrize(
    "y", [Y[:, :3, :3], Y[:, None], nn.functional.one_hot(Y).permute(0, 3, 1, 2)]
)
def test_labels_of_another_shape(y: Tensor) -> None:
    with pytest.raises(ValueError, match="labels"):
        PixelSets(network()).calibrate(X, y)


def test_labels_that_are_no_integers() -> None:
    with pytest.raises(TypeError, match="float32"):
        PixelSets(network()).calibrate(X, Y.float())
    PixelSets(network()).calibrate(X.numpy(), Y.to(torch.uint8).numpy())


class Wrapped(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.network, self.change = network(), change

    def forward(self, x: Tensor) -> object:
        return self.change(self.network(x))


@pytest.mark.parametrize("outputs", ["logits", "double_log"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda z: {"out": z, "aux": z}, TypeError, "dict"),
        (lambda z: z.flatten(2), ValueError, "36"),
        (lambda z: z[:, :1], ValueError, "classes"),
        (lambda z: z * math.nan, ValueError, "nan"),
        (lambda z: z + z.mean(dim=0), ValueError, "rows"),
    ],
)
def test_models_that_do_not_fit(change, error: type, message: str, outputs: str) -> None:
    with pytest.raises(error, match=message):
        PixelSets(Wrapped(change), outputs=outputs).calibrate(X[:4], Y[:4])


def test_bad_images_are_named() -> None:
    x = X.clone()
    x[17, 0, 2, 2] = math.nan
    with pytest.raises(ValueError, match="17"):
        PixelSets(network(), batch_size=10).calibrate(x, Y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"outputs": "probabilities"}, "outputs"),
        ({"floor": 0.0}, "floor"),
        ({"smallest": 0.5}, "smallest"),
        ({"norm": 3}, "norm"),
        ({"method": "fast"}, "method"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PixelSets(network(), **settings)


def test_ignore_must_be_an_integer() -> None:
    with pytest.raises(TypeError, match="ignore"):
        PixelSets(network(), ignore=0.5)


# -- the result --------------------------------------------------------------------------------


def test_the_result_and_its_measures() -> None:
    sets = PixelSets(network(), "0").calibrate(X[:40], Y[:40]).predict_set(X[40:], 0.2)
    assert isinstance(sets, PixelSet)
    assert len(sets) == 20
    assert torch.equal(sets.size, sets.mask.sum(dim=1))
    assert torch.equal(sets.certain, sets.size == 1)
    torch.testing.assert_close(sets.mean_size, sets.size.double().mean(dim=(1, 2)))
    y = holed(Y[40:])
    shares = pixel_coverage(sets.mask, y.numpy(), IGNORE)
    for mask, labels, share in zip(sets.mask, y, shares, strict=True):
        pixels = [(i, j) for i in range(SIDE) for j in range(SIDE) if labels[i, j] != IGNORE]
        inside = [bool(mask[labels[i, j], i, j]) for i, j in pixels]
        assert share.item() == pytest.approx(np.mean(inside))
    with pytest.raises(ValueError, match="mask"):
        pixel_coverage(sets.mask[0], y)


def test_share_1_covers_whole_images_where_scores_do_not_tie() -> None:
    # One number per image: its largest score. The same threshold by the library's quantile.
    predictor = PixelSets(network(), "0").calibrate(X[:40], Y[:40])
    largest = to_bins(predictor.score(X[:40], Y[:40])).amax(dim=(1, 2))
    assert predictor.calibration.share_bin(0.2, 1) == conformal_quantile(largest, 0.2)


def test_sets_and_scores_of_a_loader() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 1)
    x, y = torch.randn(30, 3, 5, 5), torch.randint(0, 4, (30, 5, 5))
    sets = PixelSets(model).calibrate(x, y)
    pairs = [(x[:11], y[:11]), (x[11:], y[11:])]
    assert sets.predict_set(iter(pairs), 0.3).mask.equal(sets.predict_set(x, 0.3).mask)
    assert sets(x, 0.3).mask.equal(sets.predict_set(x, 0.3).mask)
    torch.testing.assert_close(sets.score(pairs), sets.score(x, y))
