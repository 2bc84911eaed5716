"""Coverage of Auto after ``fit``, of many new rows and of single ones, against its law.

Every case draws training, calibration and new rows anew. Rows that teach and compare do not
calibrate, so that the number of covered rows is beta-binomial with those that do: in their group,
with a known target, or complete. A correct program fails for a share ERROR_RATE of all seeds, which
are fixed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import ffcp
from tests.conftest import small_mlp
from tests.core import few_epochs
from tests.integrations.test_sets import Drawn, must_cover

pytestmark = pytest.mark.heavy
DRAWS, T, ONES, ALPHA = 25, 200, 2, 0.1


@pytest.fixture(autouse=True)
def _short_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    few_epochs(monkeypatch, 2)  # what is learned changes lengths, not coverage


def sample(rows: int, outputs: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows whose noise grows with a column, and is shared by outputs in part."""
    x = torch.randn(rows, 4, generator=draw)
    noise = torch.randn(rows, outputs, generator=draw) + torch.randn(rows, 1, generator=draw)
    return x, x[:, :1] + (0.2 + x[:, 1:2].abs()) * noise


class Fits:
    """Fits of Auto, one after the other: what each covered of new rows, and by what it must."""

    def __init__(self, outputs: int = 1, groups: int = 0, **options: Any) -> None:
        self.outputs, self.groups, self.options = outputs, groups, options
        self.methods: Counter[str] = Counter()
        self.many: dict[Any, list[Drawn]] = {}
        self.ones: dict[Any, list[Drawn]] = {}

    def draw(self, rows: int, missing: float = 0.0) -> Fits:
        for seed in range(DRAWS):
            draw = torch.Generator().manual_seed(seed)
            predictor = ffcp.Auto(small_mlp(outputs=self.outputs), seed=seed, **self.options)
            predictor.fit(*sample(60, self.outputs, draw))
            x, y = sample(rows, self.outputs, draw)
            y[torch.rand(y.shape, generator=draw) < missing] = torch.nan
            predictor.calibrate(x, y, **self.given(rows))
            assert predictor.choice.rows.compare > 0
            self.methods[predictor.method] += 1
            self.note(predictor, *sample(T, self.outputs, draw))
        assert len(self.methods) > 1  # not CP each time, say
        return self

    def given(self, rows: int) -> dict[str, Any]:
        return {"groups": [row % self.groups for row in range(rows)]} if self.groups else {}

    def note(self, predictor: ffcp.Auto, x: Tensor, y: Tensor) -> None:
        interval = predictor.predict_interval(x, ALPHA, **self.given(T))
        assert len(interval.upper.unique(dim=0)) > 0.9 * T
        alone = [
            predictor.predict_interval(
                x[row : row + 1], ALPHA, **({"groups": [row % self.groups]} if self.groups else {})
            )
            for row in range(ONES)
        ]
        for row, one in enumerate(alone):
            for name in ("lower", "upper"):
                torch.testing.assert_close(
                    getattr(one, name), getattr(interval, name)[row : row + 1], rtol=1e-4, atol=1e-4
                )
        inside = (interval.lower <= y) & (y <= interval.upper)
        single = torch.cat(
            [(one.lower <= y[i]) & (y[i] <= one.upper) for i, one in enumerate(alone)]
        )
        if self.options.get("joint"):
            inside, single = inside.all(dim=1, keepdim=True), single.all(dim=1, keepdim=True)
        if self.groups:
            group = torch.arange(T) % self.groups
            for name, count in predictor.calibration.groups.items():
                own = inside[group == int(name), 0]
                self._add(self.many, name, own, count)
                self._add(self.ones, name, single[group[:ONES] == int(name), 0], count)
            return
        known = (~predictor.calibration.scores.isnan()).sum(dim=0).tolist()
        for output, count in enumerate(known):
            self._add(self.many, output, inside[:, output], count)
            self._add(self.ones, output, single[:, output], count)

    def _add(self, drawn: dict[Any, list[Drawn]], name: Any, inside: Tensor, count: int) -> None:
        if len(inside):
            drawn.setdefault(name, []).append(Drawn(int(inside.sum()), len(inside), count))

    def must_cover(self) -> None:
        for drawn in (*self.many.values(), *self.ones.values()):
            must_cover(drawn, ALPHA)
        # All that are no longer than they need be: infinite intervals would cover too much.
        for drawn in self.many.values():
            assert sum(one.hits for one in drawn) < 0.97 * sum(one.rows for one in drawn)


def test_few_rows() -> None:
    Fits().draw(34).must_cover()


def test_every_group() -> None:
    Fits(groups=4).draw(120).must_cover()


def test_every_output_where_targets_are_missing() -> None:
    Fits(outputs=2, missing=True).draw(90, missing=0.4).must_cover()


def test_all_outputs_together() -> None:
    Fits(outputs=2, joint=True).draw(70).must_cover()


def test_all_outputs_together_where_targets_are_missing() -> None:
    Fits(outputs=2, joint=True, missing=True).draw(120, missing=0.3).must_cover()
