"""The square conditions: what they measure, and when they are met."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ffcp import FFCP, conformal_quantile
from ffcp_paper.experiments import square_conditions
from ffcp_paper.experiments.square_conditions import Square
from ffcp_paper.experiments.tasks import TRAINED, Measured, Method, Results, Settings
from ffcp_paper.networks.regression import SPLIT_POINTS, mlp
from ffcp_paper.tables import paper_tables


def rows(seed: int, n: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 3, generator=generator), torch.rand(n, generator=generator)


def test_the_quantities_are_those_of_the_theorem() -> None:
    torch.manual_seed(0)
    model, cal, test = mlp(3).eval(), rows(0), rows(1)
    for split, found in enumerate(square_conditions.measure(model, cal, test, 0.1, range(4))):
        fast = FFCP(model, SPLIT_POINTS[split])
        one, other = (fast.score(*some).flatten() for some in (cal, test))
        q = conformal_quantile(one, 0.1)
        assert found.distance == pytest.approx(float((q - one).abs().mean()))
        assert found.feature_gap == pytest.approx(float((q - conformal_quantile(other, 0.1)).abs()))
        residuals = (cal[1] - model(cal[0]).detach()[:, 0]).abs()
        plain = conformal_quantile(residuals, 0.1)
        assert found.shortfall == pytest.approx(float((plain - residuals).mean()), rel=1e-5)


def test_only_the_paper_s_check_changes_with_the_unit_of_the_feature() -> None:
    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * x

    torch.manual_seed(0)
    net = mlp(3).eval()
    found = []
    for factor in (1.0, 100.0):  # layer "0" gives its feature in another unit, bands are the same
        model = nn.Sequential(*net)
        model[0] = nn.Sequential(net[0], Scaled(factor))
        model[1] = nn.Sequential(Scaled(1 / factor), net[1])
        found += square_conditions.measure(model, rows(0), rows(1), 0.1, [1])
    assert found[1].distance == pytest.approx(100 * found[0].distance, rel=1e-4)
    assert found[1].scaled == pytest.approx(found[0].scaled, rel=1e-4)
    assert found[1].shortfall == pytest.approx(found[0].shortfall, rel=1e-4)


MET = Square(0.1, 0.2, 1.0, largest=2.0, feature_gap=0.1, output_gap=0.05)


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, (True, True, True)),
        ({"distance": 1.1}, (False, True, False)),
        ({"scaled": 1.1}, (True, False, True)),
        ({"largest": 11.0}, (True, True, False)),
        ({"output_gap": 0.21}, (True, True, False)),  # 2 * 0.1 < 1 - 2 * 2 * 0.21 fails
        ({"feature_gap": 0.21}, (True, True, False)),
    ],
)
def test_when_conditions_are_met(changes: dict[str, float], met: tuple[bool, ...]) -> None:
    of = [replace(MET, **changes)] * 2
    checks = (
        square_conditions.holds_as_checked,
        square_conditions.holds_in_unit,
        square_conditions.holds_as_stated,
    )
    assert tuple(check(of) for check in checks) == met


def test_a_row_says_what_was_predicted_and_what_happened() -> None:
    found, settings = Results(), Settings(seeds=1, only=("synthetic",))
    lengths = {"CP": 2.0, 0: 1.5, 1: 2.5, 2: 1.5, 3: 2.5}
    for which, length in lengths.items():
        method = Method("CP") if which == "CP" else Method("FFCP", which)
        found.bands["synthetic", TRAINED, method, 0.1] = [Measured(0.9, length, 0.8, 100, 100)]
    never = replace(MET, distance=2.0, scaled=2.0)
    for split, one in enumerate((MET, replace(MET, distance=2.0), never, never)):
        found.squares["synthetic", split] = [one]
    table = paper_tables.build("square_conditions", found, settings)
    own = [row for row in table["rows"] if row["data"] == "synthetic"]
    assert [row["checked"] for row in own] == [True, False, False, False]
    assert [row["in_unit"] for row in own] == [True, True, False, False]
    assert [row["gap"] for row in own] == [0.1] * 4
    assert [row["holds"] for row in own] == [True, False, None, None]
    assert [row["ratio"] for row in own] == [0.75, 1.25, 0.75, 1.25]
    assert table["verdict"]["text"] == (
        "The claim holds in 1 of 2 rows (at split 0: 1 of 1; at split 1: 0 of 1)."
    )
