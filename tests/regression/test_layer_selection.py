"""The automatic choice of the layer: honest, readable, and CP where the gradient knows nothing."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.regression.layer_selection import Trial, choose, rank_correlations
from tests.core import set_aside


class Known(nn.Module):
    """Gradient at ``part`` is exp(x): f = part(x) * exp(x) with part = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1)
        nn.init.zeros_(self.part.weight)
        nn.init.zeros_(self.part.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.part(x) * x.exp())[:, 0]


def informed(rows: int = 1000) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 1)
    return x, torch.randn(rows) * x.exp()[:, 0]


def test_the_layer_that_knows_the_noise_is_chosen() -> None:
    x, y = informed()
    predictor = ffcp.FFCP(Known(), ["part", "output"]).calibrate(x, y)
    assert predictor.feature == "part"
    choice = predictor.choice
    assert choice.rows == 200
    assert len(predictor.calibration) == 800
    assert set(choice.candidates) == {"part", "output"}
    assert choice.candidates["part"].mean_length < choice.candidates["output"].mean_length
    assert choice.candidates["part"].rank_correlation > 0.5
    assert choice.candidates["output"].rank_correlation == 0
    assert all(word in str(choice) for word in ("'part'", "200"))


def test_cp_is_chosen_with_a_warning_where_the_gradient_knows_nothing() -> None:
    x = torch.randn(1000, 1)
    with pytest.warns(ffcp.FFCPWarning, match="part"):
        predictor = ffcp.FFCP(Known(), ["part"]).calibrate(x, torch.randn(1000))
    assert predictor.feature == "output"
    widths = predictor.predict_interval(x)
    assert torch.allclose(widths.upper - widths.lower, (widths.upper - widths.lower)[0])


def test_a_constant_slack_loses_the_tie_to_cp() -> None:
    residuals = torch.rand(100, 1).double()
    for constant in (1e-6, 1 / 3, 7.0):
        flat = torch.full((100, 1), constant).double()
        assert shortest(residuals, {"flat": flat}) == "output"


def shortest(residuals: Tensor, scales: dict[str, Tensor]) -> str:
    scales = {"output": torch.ones_like(residuals), **scales}
    trials = {name: Trial(residuals / scale, 2 * scale) for name, scale in scales.items()}
    return choose(torch.zeros_like(residuals), trials, 0.1).feature


def test_rows_that_choose_do_not_calibrate() -> None:
    x, y = informed(100)
    mask = set_aside(100, seed=3)
    predictor = ffcp.FFCP(Known(), ["part"], seed=3).calibrate(x, y)
    expected = ffcp.FFCP(Known(), predictor.feature).calibrate(x[~mask], y[~mask])
    torch.testing.assert_close(predictor.calibration.scores, expected.calibration.scores)


def test_the_choice_ignores_the_rows_that_calibrate() -> None:
    x, y = informed(200)
    mask = set_aside(200)
    other = torch.where(mask, y, 1e6 * torch.randn(200))
    one = ffcp.FFCP(Known(), ["part"]).calibrate(x, y)
    two = ffcp.FFCP(Known(), ["part"]).calibrate(x, other)
    assert one.choice == two.choice


def test_a_long_stream_stops_choosing_once_it_knows_enough() -> None:
    x, y = informed(60_000)
    predictor = ffcp.FFCP(Known(), ["part"]).calibrate((x[i::60], y[i::60]) for i in range(60))
    assert predictor.choice.rows == 10_000
    assert len(predictor.calibration) == 60_000 - predictor.choice.rows
    # Rows scored after the choice are scored in the same way as those before it.
    mask_free = ffcp.FFCP(Known(), "part").calibrate(x, y)
    assert torch.isin(predictor.calibration.scores, mask_free.calibration.scores).all()


def test_update_keeps_the_choice() -> None:
    x, y = informed()
    predictor = ffcp.FFCP(Known(), ["part"]).calibrate(x, y)
    choice = predictor.choice
    predictor.calibrate(x, torch.randn(1000), update=True)
    assert predictor.choice is choice
    assert len(predictor.calibration) == 1800


def test_an_output_in_large_units_does_not_decide_alone() -> None:
    residuals = torch.rand(500, 2).double() * torch.tensor([1.0, 1e6])
    knows_first = torch.stack([residuals[:, 0] + 1e-3, torch.ones(500)], dim=1)
    assert shortest(residuals, {"first": knows_first}) == "first"


@pytest.mark.parametrize("joint", [False, True])
def test_lengths_of_the_choice_are_those_of_the_bands(joint: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    x, y = torch.randn(4000, 3), torch.randn(4000, 4)
    for feature in ("0", "input"):
        predictor = ffcp.FFCP(model, [feature], joint=joint, output_scales=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            claimed = predictor.calibrate(x, y).choice.candidates
        for name in (feature, "output"):
            alone = ffcp.FFCP(model, name, joint=joint, output_scales=None).calibrate(x, y)
            measured = ffcp.metrics.mean_length(alone.predict_interval(x))
            assert claimed[name].mean_length == pytest.approx(measured, rel=0.05)


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=30))
def test_rank_correlation_agrees_with_scipy(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, dtype=float).T
    (ours,) = rank_correlations(torch.from_numpy(a), [torch.from_numpy(b)])
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert ours == 0
    else:
        assert ours == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)
