"""Bad input: every message says what is wrong and what to do."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal

X, Y = normal(30, 4, seed=0), normal(30, seed=1)


@pytest.fixture
def ready(mlp: nn.Module) -> ffcp.FFCP:
    return ffcp.FFCP(mlp, "0").calibrate(X, Y)


@pytest.mark.parametrize("alpha", [0, 1, -0.1, 1.5, math.nan, math.inf])
def test_alpha_outside_the_open_interval(ready: ffcp.FFCP, alpha: float) -> None:
    with pytest.raises(ValueError, match=str(alpha)):
        ready.predict_interval(X, alpha=alpha)


@pytest.mark.parametrize("alpha", ["0.1", True, ["0.1"], [[0.1]], [None]])
def test_alpha_that_is_no_number(ready: ffcp.FFCP, alpha: object) -> None:
    with pytest.raises(TypeError, match="alpha"):
        ready.predict_interval(X, alpha=alpha)


@pytest.mark.parametrize("make", [ffcp.CP, ffcp.FFCP])
def test_predict_before_calibrate(make, mlp: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="calibrate"):
        make(mlp).predict_interval(X)


def test_automatic_score_before_calibrate(mlp: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="feature"):
        ffcp.FFCP(mlp).score(X, Y)


@pytest.mark.parametrize("feature", ["0", "auto"])
@pytest.mark.parametrize("data", [(X[:0], Y[:0]), ([],)])
def test_empty_calibration(mlp: nn.Module, feature: str, data: tuple) -> None:
    with pytest.raises(ValueError, match="empty"):
        ffcp.FFCP(mlp, feature).calibrate(*data)


def test_empty_prediction(ready: ffcp.FFCP) -> None:
    with pytest.raises(ValueError, match=r"\bx\b"):
        ready.predict_interval(X[:0])
    with pytest.raises(ValueError, match=r"\bx\b"):
        ready.score(X[:0], Y[:0])


def test_infinite_band_when_calibration_too_small(mlp: nn.Module) -> None:
    predictor = ffcp.CP(mlp).calibrate(X[:8], Y[:8])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b8\b"):
        band = predictor.predict_interval(X, alpha=0.1)
    assert (band.lower == -math.inf).all()
    assert (band.upper == math.inf).all()


def test_one_more_point_makes_the_band_finite(mlp: nn.Module) -> None:
    band = ffcp.CP(mlp).calibrate(X[:9], Y[:9]).predict_interval(X, alpha=0.1)
    assert torch.isfinite(band.upper).all()


# -- NaN and infinity: the first bad row is named ----------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_bad_number_in_x_names_the_row(mlp: nn.Module, bad: float, batch_size: int) -> None:
    x = X.clone()
    x[17, 2] = x[21, 0] = bad
    predictor = ffcp.FFCP(mlp, "0", batch_size=batch_size)
    with pytest.raises(ValueError, match=r"\b17\b"):
        predictor.calibrate(x, Y)
    predictor.calibrate(X, Y)
    with pytest.raises(ValueError, match=r"\b17\b"):
        predictor.predict_interval(x)


def test_bad_number_in_a_dict_names_the_entry() -> None:
    class Model(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    b = torch.ones(30)
    b[3] = math.nan
    with pytest.raises(ValueError, match=r"x\[b\]"):
        ffcp.CP(Model()).calibrate({"a": Y, "b": b}, Y)


@pytest.mark.parametrize("loader", [False, True])
def test_bad_target_names_the_row(mlp: nn.Module, loader: bool) -> None:
    y = Y.clone()
    y[11] = math.nan
    data = ([(X[:8], y[:8]), (X[8:], y[8:])],) if loader else (X, y)
    with pytest.raises(ValueError, match=r"\b11\b"):
        ffcp.CP(mlp).calibrate(*data)


def test_large_but_finite_numbers_are_fine(mlp: nn.Module) -> None:
    y = Y.clone()
    y[0] = y[1] = 3e38  # their sum overflows float32
    ffcp.CP(mlp).calibrate(X, y)


class Explode(nn.Module):
    """sqrt at 0: the value is fine, the gradient is infinite. log at negative values: NaN."""

    def __init__(self, log: bool = False) -> None:
        super().__init__()
        self.inner, self.log = nn.Identity(), log

    def forward(self, x: Tensor) -> Tensor:
        v = self.inner(x[:, 0])
        return v.log() if self.log else v.abs().sqrt()


def test_bad_prediction_names_the_row() -> None:
    x = X.abs() + 0.1
    x[5] = -1
    with pytest.raises(ValueError, match=r"\b5\b"):
        ffcp.CP(Explode(log=True)).calibrate(x, Y)


def test_bad_gradient_names_the_row_and_the_feature() -> None:
    x = X.abs() + 0.1
    x[6] = 0
    with pytest.raises(ValueError, match="inner"):
        ffcp.FFCP(Explode(), "inner").calibrate(x, Y)


def test_a_failed_calibration_loses_nothing(mlp: nn.Module) -> None:
    predictor = ffcp.FFCP(mlp, ["0", "3", "output"], selection_alpha=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor.calibrate(X, Y)
    before = (predictor.feature, predictor.choice, predictor.calibration.scores.clone())
    bad = Y.clone()
    bad[-1] = math.nan
    for update in (False, True):
        with pytest.raises(ValueError, match=r"\b29\b"):
            predictor.calibrate(X, bad, update=update)
        assert (predictor.feature, predictor.choice) == before[:2]
        assert torch.equal(predictor.calibration.scores, before[2])


# -- shapes and kinds --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "y_shape"), [(1, (30, 2)), (3, (30,)), (3, (30, 1)), (1, (30, 1, 1))]
)
def test_target_shape_that_does_not_fit(outputs: int, y_shape: tuple[int, ...]) -> None:
    model = nn.Linear(4, outputs)
    with pytest.raises(ValueError, match=re.escape(str(y_shape))):
        ffcp.CP(model).calibrate(X, torch.zeros(y_shape))


def test_a_column_target_does_not_broadcast_against_a_flat_output() -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    column = ffcp.CP(model).calibrate(X, Y[:, None])
    assert column.calibration.scores.equal(ffcp.CP(model).calibrate(X, Y).calibration.scores)
    assert column.score(X, Y[:, None]).equal(column.score(X, Y))


@pytest.mark.parametrize("make", [ffcp.CQR, ffcp.LCQR, lambda m: ffcp.FFCQR(m, "0")])
def test_a_column_target_fits_two_quantiles(make) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    column, flat = make(model).calibrate(X, Y[:, None]), make(model).calibrate(X, Y)
    assert column.score(X, Y[:, None])[:, 0].equal(flat.score(X, Y))


def test_different_numbers_of_rows(mlp: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"\b29\b"):
        ffcp.CP(mlp).calibrate(X, Y[:29])


def test_input_tensors_of_different_length() -> None:
    with pytest.raises(ValueError, match="rows"):
        ffcp.CP(nn.Bilinear(4, 4, 1)).calibrate((X, X[:5]), Y)


def test_outputs_changed_since_calibration() -> None:
    predictor = ffcp.CP(nn.Identity()).calibrate(X[:, :2], torch.zeros(30, 2))
    with pytest.raises(ValueError, match=r"\b3\b"):
        predictor.predict_interval(X[:, :3])


def test_weights_changed_since_calibration(ready: ffcp.FFCP) -> None:
    nn.init.zeros_(ready.model[0].weight)
    with pytest.raises(RuntimeError, match="weights"):
        ready.predict_interval(X)


class Returns(nn.Module):
    def __init__(self, fn) -> None:
        super().__init__()
        self.layer, self.fn = nn.Linear(4, 3), fn

    def forward(self, x: Tensor) -> object:
        return self.fn(self.layer(x))


@pytest.mark.parametrize(
    ("fn", "error", "message"),
    [
        (lambda v: v.argmax(dim=1), TypeError, "int64"),
        (lambda v: (v, v), TypeError, "tuple"),
        (lambda v: {"mean": v, "spread": v}, TypeError, "dict"),
        (lambda v: v.mean(), ValueError, "shape"),
        (lambda v: v.T, ValueError, "shape"),
    ],
)
@pytest.mark.parametrize("make", [ffcp.CP, lambda model: ffcp.FFCP(model, "layer")])
def test_output_that_is_no_prediction(make, fn, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make(Returns(fn)).calibrate(X, Y)


@pytest.mark.parametrize("make", [ffcp.CP, ffcp.FFCP, lambda model: ffcp.FFCP(model, "input")])
def test_model_that_is_no_module(make) -> None:
    with pytest.raises(TypeError, match="function"):
        make(lambda x: x)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": 3}, "norm"),
        ({"floor": 0}, "floor"),
        ({"floor": math.nan}, "floor"),
        ({"selection_fraction": 1.0}, "selection_fraction"),
        ({"batch_size": 0}, "batch_size"),
        ({"feature": []}, "features"),
    ],
)
def test_settings_out_of_range(mlp: nn.Module, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FFCP(mlp, **settings)


# -- features ----------------------------------------------------------------------------------


def test_unknown_feature_lists_the_names_closest_first() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="decodr"):
        ffcp.FFCP(model, "decodr")


def test_feature_module_of_another_model(mlp: nn.Module) -> None:
    with pytest.raises(ValueError, match="model"):
        ffcp.FFCP(mlp, nn.Linear(1, 1))


def test_feature_of_the_wrong_kind(mlp: nn.Module) -> None:
    with pytest.raises(TypeError, match="int"):
        ffcp.FFCP(mlp, [0, 3])


class Odd(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        v = self.a(x)
        if self.kind == "twice":
            v = self.a(torch.tanh(v))
        if self.kind == "no influence":
            self.b(v)
        if self.kind == "detached":
            v = v.detach()
        if self.kind == "no_grad inside":
            with torch.no_grad():
                v = self.b(v)
        if self.kind == "no_grad after":
            with torch.no_grad():
                return self.head(v)
        return self.head(v)


class Decorated(Odd):
    forward = torch.no_grad()(Odd.forward)


@pytest.mark.parametrize(
    ("model", "feature", "message"),
    [
        (Odd("unreached"), "b", "'b'"),
        (Odd("twice"), "a", "'a'"),
        (Odd("no influence"), "b", "'b'"),
        (Odd("detached"), "a", "'a'"),
        (Odd("no_grad inside"), "b", "'b'"),
        (Odd("no_grad after"), "a", "graph"),
        (Decorated("plain"), "a", "'a'"),
        (Decorated("plain"), "input", "graph"),
    ],
)
def test_feature_without_a_gradient(model: nn.Module, feature: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FFCP(model, feature).calibrate(X, Y)


def test_feature_beside_another_that_does_not_influence() -> None:
    with pytest.raises(ValueError, match="'b'"):
        ffcp.gradient_norms(Odd("no influence"), X, ["input", "b"])


def test_integer_input_has_no_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    with pytest.raises(TypeError, match="int64"):
        ffcp.FFCP(model, "input").calibrate(torch.randint(0, 5, (30, 2)), torch.zeros(30, 2, 1))


def test_a_decorated_model_falls_back_to_cp_with_a_warning() -> None:
    with pytest.warns(ffcp.FFCPWarning, match="gradient"):
        predictor = ffcp.FFCP(Decorated("plain")).calibrate(X, Y)
    assert predictor.feature == "output"


# -- rows that are not independent -------------------------------------------------------------


class Mixes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.head = kind, nn.Linear(4, 4), nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        v = self.layer(x)
        if self.kind == "batch norm":
            v = nn.functional.batch_norm(v, None, None, training=True)
        if self.kind == "attention":
            v = torch.softmax(v @ v.T, dim=1) @ v
        if self.kind == "faint":
            v = v + 1e-9 * v.sum(dim=0)
        if self.kind == "random":
            v = nn.functional.dropout(v, 0.5, training=True)
        return self.head(v)


@pytest.mark.parametrize("kind", ["batch norm", "attention"])
@pytest.mark.parametrize("make", [ffcp.CP, ffcp.FFCP, lambda m: ffcp.FFCP(m, "layer")])
def test_a_model_that_mixes_rows_is_refused(make, kind: str) -> None:
    with pytest.raises(ValueError, match="mixes"):
        make(Mixes(kind)).calibrate(X, Y)


@pytest.mark.parametrize("feature", ["auto", "layer", "input"])
def test_faint_mixing_is_seen_in_the_gradient(feature: str) -> None:
    with pytest.raises(ValueError, match="mixes"):
        ffcp.FFCP(Mixes("faint"), feature).calibrate(X, Y)


def test_mixing_is_seen_in_a_loader_of_single_rows() -> None:
    rows = [(X[i : i + 1], Y[i : i + 1]) for i in range(30)]
    with pytest.raises(ValueError, match="mixes"):
        ffcp.FFCP(Mixes("attention"), "layer").calibrate(rows)


def test_an_error_of_the_model_is_not_taken_for_a_missing_gradient() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            if out.requires_grad:
                raise ValueError("refuses to be differentiated")
            return out

    with pytest.raises(ValueError, match="differentiate"):
        ffcp.FFCP(Broken()).calibrate(X, Y)


def test_a_random_model_is_refused() -> None:
    with pytest.raises(ValueError, match="passes"):
        ffcp.CP(Mixes("random")).calibrate(X, Y)


@pytest.mark.parametrize("kind", ["none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_separate_model_passes_in_every_type(kind: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(Mixes(kind).layer, nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    ffcp.FFCP(model.to(dtype), "0").calibrate(X.to(dtype), Y)


# -- loaders -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "described"),
    [(X, "Tensor"), ((X, Y, Y), "tuple"), ({"x": X, "y": Y}, "dict"), ("text", "str")],
)
def test_loader_that_yields_something_else(mlp: nn.Module, item: object, described: str) -> None:
    with pytest.raises(TypeError, match=described):
        ffcp.CP(mlp).calibrate([(X, Y), item])


@pytest.mark.parametrize("x", [X, X.numpy(), {"x": X}, 3])
def test_targets_forgotten(mlp: nn.Module, x: object) -> None:
    with pytest.raises(TypeError, match="targets"):
        ffcp.CP(mlp).calibrate(x)


def test_loader_and_targets(mlp: nn.Module) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y))
    with pytest.raises(TypeError, match="loader"):
        ffcp.CP(mlp).calibrate(loader, Y)


def test_words_instead_of_numbers(mlp: nn.Module) -> None:
    with pytest.raises(TypeError, match="numbers"):
        ffcp.CP(mlp).calibrate(np.array([["a"] * 4] * 30), Y)
    with pytest.raises(TypeError, match="numbers"):
        ffcp.CP(mlp).calibrate(X, np.array(["a"] * 30))


def test_too_few_rows_to_choose_and_calibrate(mlp: nn.Module) -> None:
    with pytest.warns(ffcp.FFCPWarning, match="feature"):
        predictor = ffcp.FFCP(mlp, seed=1).calibrate(X[:1], Y[:1])
    assert predictor.feature == "output"


# -- first attempts: each mistake gets a sentence that says what to do -------------------------

CLASSES = nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (lambda m: ffcp.CP(m).calibrate(X, Y[:-3]), "one target for each row"),
        (lambda m: ffcp.CP(m).calibrate(Y, X), "y comes after x"),
        (lambda m: ffcp.CP(CLASSES).calibrate(X, torch.zeros(30)), "LAC"),
        (lambda m: ffcp.CP(CLASSES, output=0).calibrate(X, Y), r"out\[:, 0\]"),
        (lambda m: ffcp.CP(m).calibrate(X, Y, groups="town"), r"frame\['town'\]"),
        (lambda m: ffcp.CP(m).calibrate(["a text"], ["another"]), "tokenizer"),
        (lambda m: ffcp.LAC(CLASSES).calibrate(X, (Y > 0).long()).predict_set("text"), "tokenize"),
        (lambda m: ffcp.FFCP(m, feature=0), "give '0'"),
        (lambda m: ffcp.CP(m, calibration="weighted"), r"Marginal\(\)"),
        (lambda m: ffcp.LAC(m, calibration=ffcp.calibrations.Weighted), r"Marginal\(\)"),
        (lambda m: ffcp.Auto(m, calibration="marginal"), r"Marginal\(\)"),
        (
            lambda m: ffcp.LCP(m, calibration=ffcp.calibrations.Marginal()),
            "LCP takes no argument 'calibration'",
        ),
        (lambda m: ffcp.SetPredictor(m, "raps"), "ffcp.RAPS"),
        (lambda m: ffcp.RiskControl("false_negatives", m), "the model is first"),
        (lambda m: ffcp.CP(m).fit_output_scales(X, Y), r"calibrate\(x, y\)"),
        (lambda m: ffcp.CP(m).calibrate(X, Y, new=X), "leave it out"),
        (lambda m: ffcp.CP(m).merge([ffcp.CP(m)]), "one predictor"),
        (lambda m: ffcp.CP(m).calibrate(X, Y).export("no.onnx", X, alpha=0.1), "alphas="),
        (lambda m: ffcp.CP(m, joint="all"), "'ellipsoid'"),
    ],
)
def test_a_plausible_mistake_is_answered_by_what_to_do(attempt, said: str, mlp: nn.Module) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        attempt(mlp)


def test_a_batch_of_many_keys_is_told_to_name_its_labels(mlp: nn.Module) -> None:
    with pytest.raises(TypeError, match="Rename the key of the targets to 'labels'"):
        ffcp.CP(mlp).calibrate([{"text": X, "mask": X, "target": Y}])


def test_updating_after_training_says_how_to_start_anew(mlp: nn.Module) -> None:
    predictor = ffcp.CP(mlp).calibrate(X, Y)
    with torch.no_grad():
        mlp[0].weight += 1
    with pytest.raises(ValueError, match="leave out update=True"):
        predictor.calibrate(X, Y, update=True)


def test_a_stream_with_other_settings_says_which(ready: ffcp.FFCP, tmp_path) -> None:
    ffcp.Online(ready, "aci", gamma=0.05).save(tmp_path / "stream")
    with pytest.raises(ffcp.CalibrationFileError, match=r"gamma=0.05 \(here 0.01\)"):
        ffcp.Online(ready, "aci").load(tmp_path / "stream")
