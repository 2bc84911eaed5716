"""One-sided bands, and both tails on their own: laws, formula, files and merging."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp
from tests.law import ERROR_RATE, p_value
from tests.test_combinations_law import BASES, CALIBRATIONS, SCALES

ROWS, ASKED, REPEATS, ALPHA = 49, 20, 80, 0.2
X, Y = normal(200, 4, seed=0), normal(200, seed=1)


def skewed(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 2, generator=generator)
    noise = -torch.rand(rows, generator=generator).log()  # long above, short below
    return x, 0.5 * x[:, 0] + (0.2 + x[:, 0].abs()) * noise


def misses(predictor: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Say which targets lie below and which above, asking one row at a time for some of them."""
    whole = predictor.predict_interval(x[:-2], ALPHA)
    single = [predictor.predict_interval(row[None], ALPHA) for row in x[-2:]]
    lower, upper = (torch.cat([part[end] for part in (whole, *single)]) for end in (0, 1))
    target = y.view_as(lower)
    return (target < lower).flatten(), (target > upper).flatten()


def too_many(counts: list[int], share: float) -> float:
    """P-value against "misses at most this share": small when there are too many misses."""
    shares = np.array(counts) / ASKED
    error = max(shares.std(ddof=1), 1e-3) / np.sqrt(len(shares))
    return float(stats.t.sf((shares.mean() - share) / error, df=len(shares) - 1))


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("side", ["lower", "upper", "each"])
@pytest.mark.parametrize("calibration", ["marginal", "mondrian", "nearest", "random"])
@pytest.mark.parametrize(
    ("base", "scale"),
    [
        ("point", "constant"),
        ("point", "gradient"),
        ("median", "function"),
        ("own base", "own scale"),
    ],
)
def test_every_side_keeps_its_promise(base: str, scale: str, calibration: str, side: str) -> None:
    model, make_base = BASES[base]
    pieces = make_base(), SCALES[scale](), CALIBRATIONS[calibration]()
    predictor = ffcp.IntervalPredictor(model, *pieces, seed=5, side=side)
    generator = torch.Generator().manual_seed(13)
    below, above = [], []
    for _ in range(REPEATS):
        x, y = skewed(generator, ROWS + ASKED)
        predictor.calibrate(x[:ROWS], y[:ROWS])
        low, high = misses(predictor, x[ROWS:], y[ROWS:])
        below.append(int(low.sum()))
        above.append(int(high.sum()))
    allowed = ALPHA / 2 if side == "each" else ALPHA
    assert side == "upper" or too_many(below, allowed) > ERROR_RATE
    assert side == "lower" or too_many(above, allowed) > ERROR_RATE
    assert side != "upper" or not any(below)
    assert side != "lower" or not any(above)
    if calibration == "marginal":  # the exact law, of each tail
        rank = ffcp.conformal_rank(ROWS, allowed)
        for counts in ([below] if side != "upper" else []) + ([above] if side != "lower" else []):
            hits = ASKED - np.array(counts)
            assert p_value(hits, ASKED, ROWS, rank) > ERROR_RATE


def test_the_test_can_fail() -> None:
    assert too_many([5, 6, 5, 4] * 20, ALPHA) < ERROR_RATE
    assert too_many([4, 4, 3, 5] * 20, ALPHA) > ERROR_RATE


@pytest.mark.heavy
@pytest.mark.parametrize("joint", [True, 0.5, "bonferroni"])
@pytest.mark.parametrize("side", ["lower", "upper", "each"])
def test_boxes_keep_the_promise_of_their_side(side: str, joint: Any) -> None:
    if side == "each" and joint == 0.5:
        return  # refused
    model = nn.Linear(2, 3)
    predictor = ffcp.CP(model, joint=joint, side=side)
    generator = torch.Generator().manual_seed(17)
    rows, lost = 59, {"below": [], "above": []}
    for _ in range(60):
        x = torch.randn(rows + ASKED, 2, generator=generator)
        noise = -torch.rand(rows + ASKED, 3, generator=generator).log()
        y = model(x).detach() + noise * torch.tensor([1.0, 5.0, 0.2])
        band = predictor.calibrate(x[:rows], y[:rows]).predict_interval(x[rows:], ALPHA)
        target = y[rows:]
        for name, outside in (("below", target < band.lower), ("above", target > band.upper)):
            share = 1 - outside.double().mean(dim=1)
            wanted = float(joint) if joint == 0.5 else 1.0
            lost[name].append(int((share < wanted - 1e-9).sum()))
    allowed = ALPHA / 2 if side == "each" else ALPHA
    for counts in lost.values():
        assert too_many(counts, allowed) > ERROR_RATE


@pytest.mark.parametrize("scale", ["constant", "function"])
def test_each_end_has_the_quantile_of_its_own_tail(scale: str) -> None:
    model = small_mlp()
    size = {"constant": None, "function": lambda seen: 0.2 + seen.x[:, 0].abs()}[scale]
    scale = torch.ones(200) if size is None else 0.2 + X[:, 0].abs()
    predictor = ffcp.IntervalPredictor(model, scale=size, side="each").calibrate(X, Y)
    signed = ((Y - predictor.predict_interval(X).prediction) / scale).double()
    rank = ffcp.conformal_rank(200, 0.05)
    low, high = signed.sort().values[[200 - rank, rank - 1]]
    band = predictor.predict_interval(X, 0.1)
    centre = band.prediction.double()
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(band.lower.double(), centre + low * scale, **close)
    torch.testing.assert_close(band.upper.double(), centre + high * scale, **close)
    scores = predictor.score(X, Y)
    assert scores.shape == (200, 2)
    torch.testing.assert_close(scores[:, 1], signed)
    torch.testing.assert_close(scores[:, 0], -signed)


def test_one_end_is_open_or_the_end_of_the_support() -> None:
    lower = ffcp.CP(small_mlp(), side="lower").calibrate(X, Y).predict_interval(X)
    upper = ffcp.CP(small_mlp(), side="upper").calibrate(X, Y).predict_interval(X)
    assert (lower.upper == torch.inf).all()
    assert (upper.lower == -torch.inf).all()
    support = (float(Y.min()) - 1, float(Y.max()) + 1)
    cut = ffcp.CP(small_mlp(), side="lower", support=support).calibrate(X, Y).predict_interval(X)
    torch.testing.assert_close(cut.upper, torch.full_like(cut.upper, support[1]))


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("side", ["lower", "upper", "each"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_layer_is_chosen_for_the_side_that_is_promised(side: str, joint: bool) -> None:
    y = normal(200, 3, seed=1) * (0.1 + X[:, :1].abs())
    model = small_mlp(outputs=3)
    predictor = ffcp.FFCP(model, ["0", "1"], side=side, joint=joint).calibrate(X, y)
    assert set(predictor.choice.candidates) == {"output", "0", "1"}
    assert predictor.choice.alpha == 0.1
    assert predictor.calibration.scores.shape[1] == (1 if joint else 3) * (
        2 if side == "each" else 1
    )


@pytest.mark.parametrize("side", ["lower", "each"])
def test_sides_are_saved_merged_and_not_mixed(side: str, tmp_path: Path) -> None:
    model = small_mlp()
    parts = [ffcp.CP(model, side=side).calibrate(X[i::2], Y[i::2]) for i in range(2)]
    whole = ffcp.CP(model, side=side).calibrate(X, Y).predict_interval(X)
    merged = copy.deepcopy(parts[0]).merge(parts[1])
    assert torch.equal(merged.predict_interval(X).lower, whole.lower)
    merged.save(tmp_path / "c.safetensors")
    again = ffcp.load(tmp_path / "c.safetensors", model).predict_interval(X)
    assert torch.equal(again.upper, whole.upper)
    with pytest.raises(ValueError, match="side"):
        ffcp.CP(model).calibrate(X[::2], Y[::2]).merge(parts[1])
    with pytest.raises(ffcp.CalibrationFileError, match="side"):
        ffcp.CP(model).load(tmp_path / "c.safetensors")


def test_what_has_no_side_says_so() -> None:
    with pytest.raises(ValueError, match="left"):
        ffcp.CP(small_mlp(), side="left")
    for method in (ffcp.FCP, ffcp.FCQR):
        with pytest.raises(ValueError, match="side"):
            method(small_mlp(outputs=2), "0", side="each")


def test_an_infinite_group_beside_one_that_shrinks_is_no_nan() -> None:
    by = ffcp.calibrations.Mondrian(by=lambda x: (x[:, 0] > 1).long())
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([-50.0, 50.0]))
    x = torch.cat([torch.zeros(99, 1), torch.full((2, 1), 2.0)])
    predictor = ffcp.IntervalPredictor(model, ffcp.scores.Quantiles(), calibration=by).calibrate(
        x, normal(101, seed=2)
    )
    with pytest.warns(ffcp.FFCPWarning, match="infinite"):
        band = predictor.predict_interval(torch.tensor([[0.0], [2.0]]))
    assert band.lower[1] == -torch.inf
    assert band.upper[1] == torch.inf
    assert band.width[0] < 10


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("side", ["lower", "upper"])
def test_a_choice_among_limits_does_not_speak_of_length(side: str, tmp_path: Path) -> None:
    model = small_mlp()
    # All targets lie so far on the other side that the limit crosses the prediction.
    moved = Y + (9.0 if side == "lower" else -9.0)
    for predictor in (
        ffcp.FFCP(model, side=side, seed=0),
        ffcp.Auto(model, side=side, seed=0, criterion="length"),
    ):
        choice = predictor.calibrate(X, moved).choice
        assert choice.side == side
        said = str(choice)
        assert side in said
        assert "length" not in said  # which a limit has not
        assert " -" in said
        predictor.save(tmp_path / "kept")
        assert ffcp.load(tmp_path / "kept", model).choice == choice


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_a_choice_of_both_sides_speaks_of_length() -> None:
    assert "length" in str(ffcp.FFCP(small_mlp(), seed=0).calibrate(X, Y).choice)


def test_a_warning_about_limits_does_not_speak_of_length() -> None:
    with pytest.warns(ffcp.FFCPWarning, match="CP") as caught:
        ffcp.FFCP(small_mlp(), ["0"], side="lower", seed=1).calibrate(X, Y)
    assert "length" not in str(caught[0].message)
