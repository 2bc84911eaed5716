"""The curvature of the head along its gradient, and the slack made of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.conformal.rank import conformal_rank
from ffcp.network import passes
from tests.conftest import normal
from tests.law import ERROR_RATE, draw_hits, p_value


class Bowl(nn.Module):
    """Half of x^T A x, and a slope: its Hessian is A."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Identity()
        self.register_buffer("a", torch.tensor([[2.0, 0.5], [0.5, -1.0]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        v = self.skip(x)
        return ((v @ self.a) * v).sum(dim=1, keepdim=True) / 2 + v[:, :1]


def smooth() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def curvature(model: nn.Module, x: Tensor, name: str, step: float) -> Tensor:
    return passes.see(model, x, ffcp.Needs(curvature=(name,), step=step)).curvature[name]


@pytest.mark.parametrize("step", [0.1, 3.0])
@pytest.mark.parametrize("name", ["input", "skip"])
def test_a_parabola_has_the_curvature_of_its_hessian(name: str, step: float) -> None:
    bowl, x = Bowl(), normal(20, 2, seed=0).double()
    gradient = x @ bowl.a + torch.tensor([1.0, 0.0])
    unit = gradient / gradient.norm(dim=1, keepdim=True)
    expected = ((unit @ bowl.a) * unit).sum(dim=1, keepdim=True)
    torch.testing.assert_close(curvature(bowl, x, name, step), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["0", "2", "input"])
def test_a_small_step_gives_the_hessian_along_the_gradient(name: str) -> None:
    model, x = smooth().double(), normal(10, 3, seed=1).double()
    cut = 0 if name == "input" else int(name) + 1
    v, head = model[:cut](x).detach(), model[cut:]
    found = curvature(model, x, name, 1e-3)
    for row in range(len(x)):
        gradient = torch.autograd.functional.jacobian(head, v[row : row + 1]).flatten()
        hessian = torch.autograd.functional.hessian(lambda one: head(one).sum(), v[row : row + 1])
        unit = gradient / gradient.norm()
        expected = unit @ hessian.reshape(len(unit), -1) @ unit
        assert float(found[row]) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_a_head_cut_out_and_the_whole_model_say_the_same() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = smooth()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    x = normal(30, 3, seed=2)
    torch.testing.assert_close(
        curvature(smooth(), x, "2", 0.5), curvature(Wrapped(), x, "inner.2", 0.5)
    )


def test_a_zero_gradient_has_no_curvature_and_the_floor_as_slack() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, -100.0)
    x = normal(30, 3, seed=0)
    assert not curvature(model, x, "0", 1.0).any()
    slack = ffcp.Curvature("0", floor=0.25)
    seen = passes.see(model, x, slack.needs())
    assert slack(seen).eq(0.25).all()


def test_it_is_saved_and_can_be_chosen(tmp_path: Path) -> None:
    model, x, y = smooth(), normal(400, 3, seed=0), normal(400, seed=1)
    predictor = ffcp.Bands(model, slack=ffcp.Curvature("0", step=0.5)).calibrate(x, y)
    predictor.save(tmp_path / "bands")
    loaded = ffcp.load(tmp_path / "bands", model)
    assert torch.equal(loaded.predict_interval(x).upper, predictor.predict_interval(x).upper)
    # Noise that follows this very slack: it is chosen, and plain CP is not.
    seen = passes.see(model, x, predictor.slack.needs())
    noise = (predictor.slack(seen) ** 3)[:, 0].float() * normal(400, seed=3)
    several = [ffcp.GradientNorm("2"), ffcp.Curvature("0", step=0.5)]
    chosen = ffcp.Bands(model, slack=several).calibrate(x, model(x)[:, 0].detach() + noise)
    assert chosen.slack.settings()["slack"] == "curvature"


def test_threads_see_what_one_sees() -> None:
    model, parts = smooth(), [normal(50, 3, seed=seed) for seed in range(8)]
    expected = [curvature(model, x, "2", 0.5) for x in parts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: curvature(model, x, "2", 0.5), parts))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_several_outputs_and_other_nonsense_are_refused() -> None:
    several = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="one output, and the model has 2"):
        ffcp.Bands(several, slack=ffcp.Curvature("0")).calibrate(
            normal(40, 3, seed=0), normal(40, 2, seed=1)
        )
    with pytest.raises(ValueError, match="step must be a positive number"):
        ffcp.Curvature("0", step=0)
    with pytest.raises(ValueError, match=r"step=1\.0 and another for step=2\.0"):
        ffcp.Curvature("0").needs().joined(ffcp.Curvature("0", step=2).needs())


@pytest.mark.heavy
def test_bands_of_second_order_obey_the_law_of_split_conformal_prediction() -> None:
    """A right program fails for a share ERROR_RATE of all seeds."""
    model = smooth()

    def sample(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, 3, generator=generator)
        return x, x[:, 0] * torch.randn(rows, generator=generator)

    def covered(x_cal: Tensor, y_cal: Tensor, x: Tensor, y: Tensor) -> Tensor:
        bands = ffcp.Bands(model, slack=ffcp.Curvature("0")).calibrate(x_cal, y_cal)
        return bands.predict_interval(x, 0.1).contains(y)

    hits = draw_hits(sample, covered, n=60, t=40, repeats=300)
    assert p_value(hits, 40, 60, conformal_rank(60, 0.1)) > ERROR_RATE
