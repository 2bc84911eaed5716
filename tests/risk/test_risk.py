"""Risk control: its law, PixelSets as a case of it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import ffcp
from ffcp.risk.losses import NAMED, false_negatives
from ffcp.segmentation.counts import EDGES
from tests.conftest import normal
from tests.core import rewrite
from tests.law import ERROR_RATE

ALPHA, ROWS, ASKED, REPEATS = 0.1, 80, 100, 100
GRID = [step / 50 for step in range(51)]  # coarse: many calibrations


class Fixed(nn.Module):
    """A multi-label classifier that is wrong in level: truths are rarer than it says."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def draw(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 5, generator=generator)
    return x, torch.rand(rows, 5, generator=generator) < (2 * x - 1).sigmoid()


def doubled(mask: Tensor, y: Tensor) -> Tensor:
    return 2 * false_negatives(mask, y)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize(
    ("loss", "bound"), [("false_negatives", 1), ("any_missed", 1), (doubled, 2)]
)
def test_the_expected_loss_is_at_most_alpha_and_not_far_below(loss: Any, bound: float) -> None:
    generator, risks = torch.Generator().manual_seed(1), []
    predictor = ffcp.RiskControl(Fixed(), loss, bound=bound, grid=GRID)
    alpha, lost = ALPHA * bound, NAMED.get(loss, loss)
    for _ in range(REPEATS):
        x, y = draw(generator, ROWS + ASKED)
        found = predictor.calibrate(x[:ROWS], y[:ROWS]).predict_set(x[ROWS:], alpha)
        risks.append(float(lost(found.sets, y[ROWS:]).mean()))
    mean, error = np.mean(risks), np.std(risks, ddof=1) / np.sqrt(REPEATS)
    assert stats.norm.sf((mean - alpha) / error) > ERROR_RATE
    # Theorem 2 of the paper: no more than 2 bound / (n + 1) below, and the grid's step.
    least = alpha - bound * (2 / (ROWS + 1) + 0.03)
    assert stats.norm.cdf((mean - least) / error) > ERROR_RATE


@pytest.mark.heavy
def test_without_the_bound_in_the_sum_the_law_would_fail() -> None:
    generator, risks = torch.Generator().manual_seed(1), []
    predictor = ffcp.RiskControl(Fixed(), "any_missed", grid=GRID)
    few = 12
    for _ in range(200):
        x, y = draw(generator, few + ASKED)
        losses = predictor.losses(x, y)
        greedy = int((losses[:few].mean(dim=0) <= ALPHA).nonzero()[0, 0])
        risks.append(float(losses[few:, greedy].mean()))
    error = np.std(risks, ddof=1) / np.sqrt(len(risks))
    assert stats.norm.sf((np.mean(risks) - ALPHA) / error) < ERROR_RATE


def test_whether_y_is_missed_gives_the_conformal_quantile() -> None:
    scores, y = torch.rand(57, 1, generator=torch.Generator().manual_seed(2)), torch.zeros(57, 1)
    grid = sorted(scores[:, 0].tolist())
    risk = ffcp.RiskControl(
        ffcp.Stored(),
        lambda level, y: (scores[:, 0] > level).double(),
        sets=lambda output, level: level,
        grid=grid,
    ).calibrate(scores, y)
    for alpha in (0.05, 0.1, 0.3, 0.5):
        found = float(risk.calibration.quantile(alpha))
        assert found == float(ffcp.conformal_quantile(scores[:, 0].double(), alpha))


@pytest.mark.long
def test_pixel_sets_are_a_case_of_risk_control() -> None:
    model, x = nn.Conv2d(3, 4, 1), normal(40, 3, 5, 5, seed=3)
    y = torch.randint(0, 4, (40, 5, 5), generator=torch.Generator().manual_seed(4))
    y[:, 0, 0] = 255
    sets = ffcp.segmentation.PixelSets(model, ignore=255).calibrate(x, y)
    scores = sets.score(x, y)

    def missed(level: float, numbers: Tensor) -> Tensor:
        own = scores[numbers[:, 0].long()].flatten(1)
        return (own > level).sum(dim=1).double() / (~own.isnan()).sum(dim=1)

    rows = torch.arange(40.0)[:, None]
    same = ffcp.RiskControl(
        ffcp.Stored(), missed, sets=lambda output, level: level, grid=EDGES.tolist()
    ).calibrate(rows, rows)
    for alpha in (0.05, 0.1, 0.2, 0.4):
        expected = float(sets.calibration.quantile(alpha))
        assert float(same.calibration.quantile(alpha)) == expected


@pytest.mark.long
def test_groups_have_levels_of_their_own_and_files_come_back(tmp_path: Any) -> None:
    x, y = draw(torch.Generator().manual_seed(5), 300)
    groups = (x[:, 0] > 0).tolist()
    model = Fixed()
    predictor = ffcp.RiskControl(model).calibrate(x[:200], y[:200], groups=groups[:200])
    found = predictor.predict_set(x[200:], groups=groups[200:])
    assert len(found.level.unique()) == 2
    for name in (True, False):
        rows = torch.tensor(groups[200:]) == name
        alone = ffcp.RiskControl(model)
        old = torch.tensor(groups[:200]) == name
        expected = alone.calibrate(x[:200][old], y[:200][old]).predict_set(x[200:][rows])
        assert torch.equal(found.sets[rows], expected.sets)
    alone.save(tmp_path / "risk.safetensors")
    with pytest.raises(ffcp.CalibrationFileError, match="false_negatives"):
        ffcp.RiskControl(model, "any_missed").load(tmp_path / "risk.safetensors")
    loaded = ffcp.load(tmp_path / "risk.safetensors", model)
    assert torch.equal(loaded.predict_set(x).sets, alone.predict_set(x).sets)


@pytest.mark.parametrize("grid", [True, 0, 0.5, [0.5]])
def test_a_file_with_another_grid_is_refused(grid: Any, tmp_path: Any) -> None:
    x, y = draw(torch.Generator().manual_seed(5), 100)
    predictor = ffcp.RiskControl(Fixed(), grid=[0.0, 0.5, 1.0]).calibrate(x, y)
    path = tmp_path / "risk.safetensors"
    predictor.save(path)
    rewrite(path, lambda tensors, described: described["compared"]["score"].update(grid=grid))
    before = predictor.predict_set(x).sets
    with pytest.raises(ffcp.CalibrationFileError):
        predictor.load(path)
    assert torch.equal(predictor.predict_set(x).sets, before)


@pytest.mark.long
def test_too_few_rows_are_told_and_lose_nothing() -> None:
    x, y = draw(torch.Generator().manual_seed(6), 8)
    predictor = ffcp.RiskControl(Fixed()).calibrate(x, y)
    with pytest.warns(ffcp.FFCPWarning, match="9"):
        found = predictor.predict_set(x, 0.1)
    assert bool(found.sets.all())
    assert bool(found.level.isinf().all())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda mask, y: mask.double().mean(dim=1), "grow"),
        (lambda mask, y: 3 - mask.double().sum(dim=1), "bound"),
        (lambda mask, y: mask, "shape"),
        ("misses", "misses"),
    ],
)
def test_what_is_no_monotone_bounded_loss_is_refused(loss: Any, message: str) -> None:
    x, y = draw(torch.Generator().manual_seed(6), 30)
    with pytest.raises(ValueError, match=message):
        ffcp.RiskControl(Fixed(), loss).calibrate(x, y)


def test_arguments_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="softmax"):
        ffcp.RiskControl(Fixed(), sets="softmax")
    for bound in (0.0, -1.0, True, float("inf")):
        with pytest.raises(ValueError, match="bound"):
            ffcp.RiskControl(Fixed(), bound=bound)
    risk = ffcp.RiskControl(Fixed())
    with pytest.raises(ValueError, match="shape"):
        risk.calibrate(normal(8, 5, seed=1), torch.ones(8, 4))
    with pytest.raises(ValueError, match="targets"):
        risk.calibrate(normal(8, 5, seed=1), torch.full((8, 5), 2))


def test_losses_and_levels_are_in_the_unit_of_the_bound() -> None:
    x, y = draw(torch.Generator().manual_seed(0), 200)
    one = ffcp.RiskControl(Fixed(), grid=GRID).calibrate(x, y)
    two = ffcp.RiskControl(Fixed(), doubled, grid=GRID, bound=2.0).calibrate(x, y)
    assert two.losses(x, y).allclose(2 * one.losses(x, y))
    assert two.predict_set(x, 0.2).sets.equal(one.predict_set(x, 0.1).sets)
    for alpha in (2.0, 0.0, True):
        with pytest.raises(ValueError, match="alpha"):
            two.predict_set(x, alpha)
