"""An exported band is the library's band, rounded outward, where there is no torch."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from scipy import stats
from torch import nn

import ffcp
from tests.export import models
from tests.export.running import holds, run_alone, run_here


def material(rows: int, outputs: int = 1) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model, x = models.mlp(outputs=outputs).eval(), torch.randn(rows, 5)
    noise = 0.2 * (0.1 + x[:, :1].abs()) * torch.randn(rows, outputs)
    return model, x, (model(x).detach() + noise)


@pytest.mark.heavy
def test_exported_ffcp_holds_the_librarys_band_and_covers(tmp_path):
    model, x, y = material(21_300)
    predictor = ffcp.FFCP(model, "0").calibrate(x[:300], y[:300])
    path = tmp_path / "band.onnx"
    predictor.export(path, x[:100], alphas=(0.1, 0.05))
    one, thousand, many = run_alone(path, {"x": x[300:301]}, {"x": x[300:1300]}, {"x": x[1300:]})
    for made, rows in ((one, slice(300, 301)), (thousand, slice(300, 1300))):
        for alpha in (0.1, 0.05):
            holds(made, predictor.predict_interval(x[rows], alpha), f"_{alpha}")
    # Given the calibration, coverage is Beta(k, n + 1 - k): outside by chance once in a million.
    for alpha, k in ((0.1, 271), (0.05, 286)):
        inside = (y[1300:] >= many[f"lower_{alpha}"]) & (y[1300:] <= many[f"upper_{alpha}"])
        law = stats.betabinom(20_000, k, 301 - k)
        assert law.ppf(5e-7) <= int(inside.sum()) <= law.ppf(1 - 5e-7)
    told = onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map
    assert told["method"] == "FFCP"
    assert told["points"] == "300"
    assert told["fingerprint"] == predictor.calibrated().fingerprint
    assert json.loads(told["settings"]) == json.loads(json.dumps(predictor.comparable()))
    session = onnxruntime.InferenceSession(path)
    for wrong in (x[:4, :3], x[:4, 0], x[:4].double()):
        with pytest.raises(Exception, match=r"[Ii]nvalid|Unexpected"):
            session.run(None, {"x": wrong.numpy()})
    silent = session.run(None, {"x": torch.full((2, 5), torch.nan).numpy()})
    assert all(bool(torch.from_numpy(end).isnan().all()) for end in silent)


@pytest.mark.long
def test_the_axis_of_rows_is_called_batch(tmp_path):
    model, x, y = material(200)
    ffcp.FFCP(model, "0").calibrate(x, y[:, 0]).export(tmp_path / "band.onnx", x[:50])
    session = onnxruntime.InferenceSession(tmp_path / "band.onnx")
    assert [one.shape for one in session.get_inputs()] == [["batch", 5]]
    assert [one.shape for one in session.get_outputs()] == 3 * [["batch"]]


@pytest.mark.long
def test_what_is_learned_is_in_the_file_once_for_all_levels(tmp_path):
    model, x, y = material(400)
    predictor = ffcp.Learned(model, learner="network", nested="grown", seed=0).calibrate(x, y[:, 0])
    nodes = []
    for alphas in ((0.1,), (0.1, 0.2, 0.3)):
        predictor.export(tmp_path / "band.onnx", x[:50], alphas=alphas)
        nodes.append(len(onnx.load(tmp_path / "band.onnx").graph.node))
    assert nodes[1] < 1.5 * nodes[0]
    made = run_here(tmp_path / "band.onnx", {"x": x[:9]})
    for alpha in (0.1, 0.2, 0.3):
        holds(made, predictor.predict_interval(x[:9], alpha), f"_{alpha}")


@pytest.mark.long
@pytest.mark.parametrize("make", [ffcp.CP, lambda m: ffcp.FFCP(m, "0")], ids=["CP", "FFCP"])
def test_ends_in_a_file_have_the_shape_of_the_targets(make, tmp_path):
    model, x, y = material(400)
    for target in (y[:, 0], y):
        predictor = make(model).calibrate(x, target)
        predictor.export(tmp_path / "band.onnx", x[:50])
        made = run_here(tmp_path / "band.onnx", {"x": x[:9]})
        assert {tuple(end.shape) for end in made.values()} == {tuple(target[:9].shape)}
        holds(made, predictor.predict_interval(x[:9]), off=0.2)


def quantiles(rows: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    model, x, _ = material(rows, outputs=2)
    return model, x, 0.3 * torch.randn(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "outputs"),
    [
        (ffcp.CP, 1),
        (lambda model: ffcp.CP(model, joint=True), 3),
        (lambda model: ffcp.FFCP(model, "3", joint="bonferroni"), 3),
        (lambda model: ffcp.FFCP(model, "3", norm=1, joint=0.5), 3),
        (lambda model: ffcp.FFCP(model, "input"), 3),
        (lambda model: ffcp.CP(model, side="lower"), 1),
        (lambda model: ffcp.FFCP(model, "0", side="upper", support=(-0.5, 0.5)), 3),
        (lambda model: ffcp.FFCP(model, "0", side="each", joint=True), 3),
    ],
)
def test_every_combination_holds_the_librarys_band(make, outputs, tmp_path):
    model, x, y = material(1_900, outputs)
    y = y.clamp(-0.5, 0.5)  # the support of one of them
    predictor = make(model).calibrate(x[:900], y[:900])
    levels = (0.05, 0.2, 0.7)
    predictor.export(tmp_path / "band.onnx", x[:100], alphas=levels)
    (made,) = run_alone(tmp_path / "band.onnx", {"x": x[900:]})
    for level in levels:
        holds(made, predictor.predict_interval(x[900:], Fraction(str(level))), f"_{level}")


def learned(**settings: Any) -> Any:
    return lambda model: ffcp.Learned(model, **settings)


@pytest.mark.heavy
def test_exported_learned_bands_hold_the_librarys(tmp_path):
    check_learned(learned(), 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "outputs", "off"),
    [
        (learned(on=("prediction", "norms"), side="lower"), 1, 0.0),
        (learned(side="each", support=(-2, 2)), 1, 0.0),
        (learned(joint=True), 3, 0.0),
        # Of two sets that are equally short the file may take the other.
        (learned(nested="grown"), 1, 0.01),
        (learned(calibration=ffcp.calibrations.Mondrian()), 1, 0.0),
        # Trees jump where the file rounds a prediction otherwise.
        (learned(learner="boosting"), 1, 0.01),
        (learned(learner="both"), 2, 0.01),
        (lambda model: ffcp.Auto(model, seed=0), 1, 0.01),
    ],
)
def test_learned_bands_of_all_kinds_hold_the_librarys(make, outputs, off, tmp_path):
    check_learned(make, outputs, tmp_path, off)


def check_learned(make: Any, outputs: int, folder: Any, off: float = 0.0) -> None:
    model, x, y = material(2_400, outputs)
    y = y.clamp(-2, 2)  # the support of one of them
    predictor, groups = make(model).fit(x[:300], y[:300]), None
    if isinstance(predictor.calibration, ffcp.calibrations.Mondrian):
        groups = [row % 2 for row in range(2_400)]
    predictor.calibrate(x[600:1400], y[600:1400], groups=groups and groups[600:1400])
    given = {"x": x[1400:]} | ({"group": groups[1400:]} if groups else {})
    band = predictor.predict_interval(x[1400:], 0.1, groups=groups and groups[1400:])
    predictor.export(folder / "band.onnx", x[:100], alphas=(0.1,))
    first = {name: value[:1] for name, value in given.items()}
    made, one = run_alone(folder / "band.onnx", given, first)
    holds(made, band, off=off)
    holds(one, ffcp.Interval(*(part[:1] for part in band)))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["both", "upper", "each"])
@pytest.mark.parametrize("method", [ffcp.CQR, lambda model, **kw: ffcp.FFCQR(model, "0", **kw)])
def test_exported_quantile_bands_shrink_as_the_librarys_do(method, side, tmp_path):
    model, x, y = quantiles(1_300)
    predictor = method(model, side=side).calibrate(x[:300], y[:300])
    predictor.export(tmp_path / "band.onnx", x[:100], alphas=(0.1, 0.9))
    (made,) = run_alone(tmp_path / "band.onnx", {"x": x[300:]})
    for alpha in (0.1, 0.9):
        holds(made, predictor.predict_interval(x[300:], Fraction(str(alpha))), f"_{alpha}")


@pytest.mark.slow
def test_groups_are_an_input_and_an_unknown_one_has_the_whole_line(tmp_path):
    model, x, y = material(1_600)
    groups = ["ab"[row % 2] for row in range(1_600)]
    predictor = ffcp.FFCP(model, "0").calibrate(x[:600], y[:600], groups=groups[:600])
    predictor.export(tmp_path / "band.onnx", x[:100], alphas=(0.2,))
    session = onnxruntime.InferenceSession(tmp_path / "band.onnx")
    labels = json.loads(session.get_modelmeta().custom_metadata_map["groups"])
    given = {"x": x[600:], "group": [labels.index(group) for group in groups[600:]]}
    made, strange = run_alone(tmp_path / "band.onnx", given, {**given, "group": [2, -1] * 500})
    band = predictor.predict_interval(x[600:], 0.2, groups=groups[600:])
    holds(made, band)
    assert bool(strange["lower"].isinf().all())


def images(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "draw", "make_predictor"),
    [
        (models.residual, images, lambda m: ffcp.FFCP(m, "1")),
        (models.Recurrent, lambda n: torch.randn(n, 5, 4), lambda m: ffcp.FFCP(m, "before")),
        (models.Encoder, models.words, lambda m: ffcp.FFCP(m, "words")),
        (
            models.tabular,
            lambda n: torch.randn(n, 4),
            lambda m: ffcp.FFCP(m, "table.backbone.blocks.0"),
        ),
        (models.Segmentation, images, lambda m: ffcp.FFCP(m, "backbone", method="coloured")),
    ],
)
def test_models_of_all_kinds_are_exported_with_their_gradients(
    make, draw, make_predictor, tmp_path
):
    torch.manual_seed(0)
    model = make().eval()
    x, rest = draw(200), draw(1_000)
    output = model(**x) if isinstance(x, dict) else model(x)
    y = output.detach() + 0.1 * torch.randn_like(output)
    predictor = make_predictor(model).calibrate(x, y)
    predictor.export(tmp_path / "band.onnx", x)
    given = rest if isinstance(rest, dict) else {"x": rest}
    made, one = run_alone(
        tmp_path / "band.onnx", given, {name: part[:1] for name, part in given.items()}
    )
    band = predictor.predict_interval(rest)
    holds(made, band)
    holds(one, ffcp.Interval(*(part[:1] for part in band)))
