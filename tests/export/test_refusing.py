"""What cannot be exported says so, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ffcp

x, y = torch.linspace(-1, 1, 150).view(50, 3), torch.linspace(0, 1, 50)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Careful(ffcp.calibrations.Marginal):
    """A calibration of one's own."""


class Own(ffcp.scales.GradientNorm):
    """A scale of one's own."""


def own_column(seen: ffcp.BatchOutput) -> torch.Tensor:
    return seen.output.abs()


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda m: ffcp.IntervalPredictor(m, scale=lambda seen: seen.output.exp()), "lambda"),
        (lambda m: ffcp.IntervalPredictor(m, scale=Own("0")), "Own"),
        (lambda m: ffcp.IntervalPredictor(m, calibration=Careful()), "Careful"),
        (
            lambda m: ffcp.IntervalPredictor(
                m, calibration=ffcp.calibrations.Mondrian(by=lambda x: x[:, 0] > 0)
            ),
            "groups=",
        ),
        (lambda m: ffcp.FCP(m, "0"), "Ball"),
        (
            lambda m: ffcp.CP(m, calibration=ffcp.calibrations.Weighted(lambda x: 2 + x[:, 0])),
            "Weighted",
        ),
        (lambda m: ffcp.Learned(m, on=own_column, calibrate_rows=25), "function"),
        (lambda m: ffcp.LCP(m, ffcp.kernels.Localizer(bandwidth=20)), "Local"),
        (lambda m: ffcp.LCP(m, ffcp.kernels.Localizer(bandwidth=9)), "Local"),
        (lambda m: ffcp.FFCP(m, "0", method=ffcp.scales.Sketch(4)), "method="),
        (lambda m: ffcp.FFCP(m, "0", method=ffcp.scales.Smooth(0.1)), "method="),
    ],
)
def test_what_has_no_graph_is_refused_before_anything_is_written(make, why, tmp_path):
    groups = [0, 1] * 25 if why == "Local" else None
    predictor = make(model()).calibrate(x, y, groups=groups)
    with pytest.raises(ValueError, match=why):
        predictor.export(tmp_path / "band.onnx", x)
    assert not list(tmp_path.iterdir())


class Branching(nn.Module):
    """Goes one way or the other by the values it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if bool((x.abs() < 1e6).all()) else -y


class Fixed(Branching):
    """Fixes the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(int(x.shape[0]), 3))


@pytest.mark.long
@pytest.mark.parametrize(("made", "why"), [(Branching, "data-dependent"), (Fixed, "rows")])
def test_a_model_that_torch_cannot_write_down_leaves_the_old_file(made, why, tmp_path):
    path = tmp_path / "band.onnx"
    path.write_bytes(b"old")
    predictor = ffcp.CP(made()).calibrate(x, y)
    with pytest.raises(ValueError, match=why):
        predictor.export(path, x)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_meant_is_refused(tmp_path):
    path, predictor = tmp_path / "band.onnx", ffcp.CP(model())
    with pytest.raises(RuntimeError, match="calibrate"):
        predictor.export(path, x)
    predictor.calibrate(x, y)
    for alphas in ((), (0.1, 0.1), (0.0,), (1.0,)):
        with pytest.raises(ValueError, match="alpha"):
            predictor.export(path, x, alphas)
    with pytest.raises(ValueError, match="random"):
        predictor.export(path, x, random=0.5)
    with pytest.raises(ValueError, match="example"):
        predictor.export(path, x[:0])
    with torch.no_grad():
        predictor.model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="weights"):
        predictor.export(path, x)
    assert not path.exists()


@pytest.mark.heavy
def test_a_file_of_infinite_bands_is_written_with_a_warning(tmp_path):
    predictor = ffcp.CP(model()).calibrate(x, y)
    with pytest.warns(ffcp.FFCPWarning, match="alpha="):
        predictor.export(tmp_path / "band.onnx", x, alphas=(0.001,))
