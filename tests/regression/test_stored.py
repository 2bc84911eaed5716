"""Intervals around stored predictions in one call: those of a predictor."""

import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import ffcp

RANDOM = np.random.default_rng(0)


def rows(count, quantiles, scale=1.0):
    y = scale * RANDOM.standard_normal(count)
    point = y + scale * RANDOM.standard_normal(count)
    return (np.stack([point - 0.5 * scale, point + scale], axis=1) if quantiles else point), y


def by_predictor(prediction, y, new, alpha, quantiles):
    kind = ffcp.CQR if quantiles else ffcp.CP
    return kind(ffcp.Stored()).calibrate(prediction, y).predict_interval(new, alpha)


def must_agree(prediction, y, new, alpha=0.1, quantiles=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        band = ffcp.intervals_from(prediction, y, new, alpha, quantiles=quantiles)
        expected = by_predictor(prediction, y, new, alpha, quantiles)
    for mine, theirs in zip(band, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert band.alpha == expected.alpha


@pytest.mark.parametrize("quantiles", [False, True])
@pytest.mark.parametrize("count", [1, 2, 9, 10, 300, 8192, 20_000])
@pytest.mark.parametrize("alpha", [0.1, 0.7, Fraction(1, 3), 0.01])
def test_bands_are_those_of_a_predictor(count, alpha, quantiles):
    (prediction, y), (new, _) = rows(count, quantiles), rows(17, quantiles)
    must_agree(prediction, y, new, alpha, quantiles)


@pytest.mark.parametrize("quantiles", [False, True])
@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e200, 1e307])
def test_numbers_of_any_size_agree(scale, quantiles):
    (prediction, y), (new, _) = rows(500, quantiles, scale), rows(17, quantiles, scale)
    must_agree(prediction, y, new, 0.1, quantiles)


def test_ties_and_a_perfect_model_agree():
    y = np.round(RANDOM.standard_normal(9000))
    must_agree(np.zeros(9000), y, np.arange(3.0))
    must_agree(y, y.copy(), np.arange(3.0))


def test_quantiles_that_cross_or_cover_too_much_agree():
    prediction, y = rows(500, quantiles=True)
    new = rows(20, quantiles=True)[0]
    crossed = prediction.copy()
    crossed[::3] = crossed[::3, ::-1]
    must_agree(crossed, y, new, quantiles=True)
    must_agree(prediction, y, new[:, ::-1].copy(), quantiles=True)
    must_agree(prediction + np.array([-9.0, 9.0]), y, new, quantiles=True)  # the band shrinks


@pytest.mark.parametrize(
    "form",
    [
        lambda a: a.astype(np.float32),
        torch.from_numpy,
        lambda a: torch.from_numpy(a).float(),
        np.ndarray.tolist,
        list,  # of numbers of numpy
        lambda a: a[::-1],
        lambda a: a[:, None],
        lambda a: np.round(a).astype(int),
        lambda a: a.astype(">f8"),
    ],
)
def test_whatever_a_predictor_takes_is_taken(form):
    (prediction, y), (new, _) = rows(400, quantiles=False), rows(7, quantiles=False)
    must_agree(form(prediction), y, form(new))


def test_several_outputs_and_levels_agree():
    y = RANDOM.standard_normal((400, 3))
    must_agree(y + 1, y, y[:5])
    must_agree(y[:, 0] + 1, y[:, 0].copy(), y[:5, 0].copy(), alpha=[0.1, 0.2])


def test_the_arrays_given_stay_as_they_are():
    given = [*rows(9000, quantiles=True), rows(9, quantiles=True)[0]]
    before = [array.copy() for array in given]
    ffcp.intervals_from(*given, quantiles=True)
    assert all(np.array_equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("quantiles", [False, True])
@pytest.mark.parametrize("give", [ffcp.intervals_from, by_predictor])
def test_what_is_written_to_the_arrays_later_changes_no_band(give, quantiles):
    (prediction, y), (new, _) = rows(500, quantiles), rows(9, quantiles)
    band = give(prediction, y, new, alpha=0.1, quantiles=quantiles)
    before = [part.clone() for part in band]
    for array in (prediction, y, new):
        array[:] = 7
    assert all(torch.equal(a, b) for a, b in zip(band, before, strict=True))


@pytest.mark.parametrize("quantiles", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["prediction", "y", "new"])
def test_what_is_no_number_is_named_with_its_row(where, bad, quantiles):
    given = dict(zip(("prediction", "y"), rows(500, quantiles), strict=True))
    given["new"] = rows(500, quantiles)[0]
    for column in (0, -1):
        spoiled = {name: array.copy() for name, array in given.items()}
        spoiled[where].reshape(500, -1)[321, column] = bad
        with pytest.raises(ValueError, match=r"\b321\b"):
            ffcp.intervals_from(**spoiled, quantiles=quantiles)


def test_too_few_points_give_the_whole_line_and_a_warning():
    with pytest.warns(ffcp.FFCPWarning, match=r"\b9\b"):
        band = ffcp.intervals_from(np.zeros(8), np.ones(8), np.zeros(2))
    assert band.lower.tolist() == [-np.inf] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((np.zeros(8), np.zeros(7), np.zeros(2)), r"\b7\b"),
        ((np.zeros((8, 3)), np.zeros(8), np.zeros((2, 3))), r"\b8\b"),
        ((np.zeros(0), np.zeros(0), np.zeros(2)), "rows"),
        ((np.zeros(9), np.zeros(9), np.zeros(0)), "rows"),
        ((np.zeros(9), np.zeros(9), np.zeros((2, 2))), "outputs"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ffcp.intervals_from(*given)


def test_one_output_is_not_two_quantiles():
    with pytest.raises(ValueError, match="quantile"):
        ffcp.intervals_from(np.zeros(50), np.zeros(50), np.zeros(2), quantiles=True)


def test_what_is_no_level_is_refused():
    with pytest.raises(ValueError, match="alpha"):
        ffcp.intervals_from(np.zeros(50), np.zeros(50), np.zeros(2), alpha=10)
