"""FCP, its inversion, its head, and the quantile family."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp import surrogate
from ffcp.network.heads import head
from ffcp.network.passes import see
from ffcp_paper.training import train_quantiles
from ffcp.pieces import Needs
from tests.conftest import normal, small_mlp

X, NEW = normal(200, 4, seed=0), normal(50, 4, seed=2)
NORMS = [2, math.inf]


def leaky(outputs: int = 1) -> nn.Sequential:
    """A network whose head reaches every number."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 8), nn.LeakyReLU(0.2),
        nn.Linear(8, outputs),
    )  # fmt: skip


def targets(model: nn.Module, x: Tensor, seed: int = 5) -> Tensor:
    return model(x).detach().mean(dim=1) + 0.3 * normal(len(x), seed=seed)


# -- the head ----------------------------------------------------------------------------------


class Skips(nn.Module):
    def __init__(self, around: bool) -> None:
        super().__init__()
        self.stem, self.mid, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        v = self.stem(x)
        w = torch.relu(self.mid(torch.relu(v)))
        return self.last(w + v if self.around else w + 1)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5))
        self.block = Skips(around=True)
        self.block.last = nn.Linear(4, 4)
        self.fit, self.out = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        v = self.block(self.fit(self.trunk(x)))
        return self.out(nn.functional.dropout(v, 0.5, self.training))


@pytest.mark.parametrize(
    ("model", "feature"),
    [
        (small_mlp(), "0"),
        (small_mlp(), "3"),
        (small_mlp(), "input"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 1)), "0.0"),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), nn.Linear(3, 1)), "0"),
        (Skips(around=False), "stem"),
        (Skips(around=True), "stem"),
        (Nested(), "trunk.0"),
        (Nested(), "block"),
        (Nested(), "fit"),
    ],
)
def test_head_of_the_feature_is_the_model(model: nn.Module, feature: str) -> None:
    model.eval()
    seen = see(model, X, Needs(values=(feature,)))
    torch.testing.assert_close(head(model, feature)(seen.values[feature]), seen.output)


def test_a_skip_connection_around_the_cut_is_named() -> None:
    with pytest.raises(ValueError, match=r"behind 'mid' also needs 'stem', which comes around"):
        ffcp.FCP(Skips(around=True), "mid")


def test_a_model_that_cannot_be_traced_asks_for_its_head() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) if x.sum() > -1e9 else x

    model = Branches()
    with pytest.raises(ValueError, match=r"cannot trace.*Pass it yourself: head="):
        ffcp.FCP(model, "first")
    ffcp.FCP(model, "first", head=model.second, steps=3).calibrate(X, torch.zeros(200))
    with pytest.raises(ValueError, match=r"does not give the model's output"):
        ffcp.FCP(model, "first", head=nn.Linear(3, 1), steps=3).calibrate(X, torch.zeros(200))


def test_a_layer_without_bounds_is_named_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=1), nn.Linear(4, 1))
    with pytest.raises(TypeError, match="Softmax"):
        ffcp.FCP(model, "0")


# -- the inversion -----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_exact_inversion_finds_the_nearest_feature_of_a_linear_head(norm: float) -> None:
    weight = normal(5, seed=1)
    v, y = normal(40, 5, seed=2), normal(40, seed=3)
    distance = surrogate.exact_distance(lambda u: u @ weight, v, y, norm=norm)
    dual = weight.norm() if norm == 2 else weight.abs().sum()
    torch.testing.assert_close(distance, (y - v @ weight).abs() / dual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_the_ball_of_the_exact_distance_holds_y(norm: float) -> None:
    model = leaky()
    v, y = normal(200, 8, seed=2), 3 * normal(200, seed=3)
    rest = model[1:]
    distance = surrogate.exact_distance(lambda u: rest(u)[:, 0], v, y, norm=norm)
    assert torch.isfinite(distance).all()
    for method in (ffcp.bounds.ibp, ffcp.bounds.crown):
        low, high = method(rest, v, distance, norm)
        assert ((low[:, 0] - 1e-5 <= y) & (y <= high[:, 0] + 1e-5)).all()


def test_unreachable_targets_are_infinitely_far() -> None:
    distance = surrogate.exact_distance(
        lambda u: u.square().sum(dim=1), torch.ones(2, 3), torch.tensor([5.0, -1.0])
    )
    assert torch.isfinite(distance).tolist() == [True, False]


def test_unconverged_points_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    y = model(X).detach()[:, 0] + 0.05
    y[7] = -1e6
    nn.init.constant_(model[2].weight, 0.1)
    with pytest.warns(ffcp.FFCPWarning, match="no feature that gives y for .* calibration points"):
        predictor = ffcp.FCP(model, "0", invert="exact").calibrate(X, y)
    assert 7 in predictor.unconverged
    assert int(predictor.calibration.scores.isinf().sum()) == len(predictor.unconverged)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("norm", NORMS)
def test_batch_size_does_not_change_the_descent(optimizer: str, norm: float) -> None:
    model = leaky()
    y = targets(model, X)
    settings = {"steps": 15, "lr": 0.05, "optimizer": optimizer, "norm": norm}
    whole = ffcp.FCP(model, "0", **settings).score(X, y)
    cut = ffcp.FCP(model, "0", batch_size=7, **settings).score(X, y)
    torch.testing.assert_close(whole, cut, rtol=1e-3, atol=1e-6)


def test_one_trajectory_serves_all_numbers_of_steps() -> None:
    model = leaky()
    rest, v, y = model[1:], normal(30, 8, seed=1), normal(30, seed=2)

    def column(u: Tensor) -> Tensor:
        return rest(u)[:, 0]

    together = surrogate.descend(column, v, y, [1, 5, 20], lr=0.05)
    for count, distance in zip([1, 5, 20], together, strict=True):
        alone = surrogate.descend(column, v, y, [count], lr=0.05)[0]
        torch.testing.assert_close(distance, alone)


def test_descent_follows_the_gradient_of_the_squared_error() -> None:
    v, y = torch.zeros(1, 1), torch.tensor([1.0])
    # v <- v - 0.1 * 2 (v - 1): 0.2, then 0.36
    distance = surrogate.descend(lambda u: u[:, 0], v, y, [1, 2], lr=0.1)
    torch.testing.assert_close(distance, torch.tensor([[0.2], [0.36]]))


# -- the number of steps -----------------------------------------------------------------------


def test_the_number_of_steps_is_chosen_on_points_that_do_not_calibrate() -> None:
    model = leaky()
    y = targets(model, X)
    predictor = ffcp.FCP(model, "0").calibrate(X, y)
    assert len(predictor.calibration) == 160
    enough = [count for count, share in predictor.step_coverage.items() if share >= 0.9]
    assert predictor.steps == (enough[0] if enough else 200)
    mask = ffcp.choose.RowSplit(0.2, 0).mask(200)
    expected = ffcp.FCP(model, "0", steps=predictor.steps).calibrate(X[~mask], y[~mask])
    torch.testing.assert_close(predictor.calibration.scores, expected.calibration.scores)


def test_loader_and_arrays_choose_the_same_steps() -> None:
    model = leaky()
    y = targets(model, X)
    whole = ffcp.FCP(model, "0").calibrate(X, y)
    stream = ffcp.FCP(model, "0").calibrate((X[i : i + 9], y[i : i + 9]) for i in range(0, 200, 9))
    assert whole.steps == stream.steps
    torch.testing.assert_close(
        whole.calibration.scores, stream.calibration.scores, rtol=1e-4, atol=1e-6
    )


def test_the_chosen_steps_travel_with_the_state() -> None:
    model = leaky()
    old = ffcp.FCP(model, "0").calibrate(X, targets(model, X))
    new = ffcp.FCP(leaky(), "0")
    new.load_state_dict(old.state_dict())
    assert new.steps == old.steps
    torch.testing.assert_close(new.predict_interval(NEW), old.predict_interval(NEW))
    assert not any(key.startswith(("_head", "head")) for key in old.state_dict())


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"norm": 1}, "norm must be 2 or"),
        ({"bound": "exact"}, "bound must be 'ibp' or 'crown'"),
        ({"invert": "newton"}, "invert must be 'descent' or 'exact'"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"lr": math.nan}, "lr must be a positive number"),
        ({"optimizer": "lbfgs"}, "optimizer must be one of sgd, adam"),
        ({"choose_fraction": 0}, "choose_fraction must lie between"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ffcp.FCP(leaky(), "0", **settings)


@pytest.mark.parametrize("make", [ffcp.CQR, lambda m: ffcp.FFCQR(m, "0"),
                                  lambda m: ffcp.FCQR(m, "0", steps=2)])  # fmt: skip
def test_a_model_with_one_output_is_refused_by_quantile_methods(make) -> None:
    with pytest.raises(ValueError, match=r"shape \(200, 1\).*two outputs"):
        make(leaky(1)).calibrate(X, torch.zeros(200))


def test_bad_numbers_are_found() -> None:
    x = X.clone()
    x[5, 0] = math.nan
    with pytest.raises(ValueError, match="x holds nan in row 5"):
        ffcp.FCP(leaky(), "0", steps=2).calibrate(x, torch.zeros(200))


def test_predict_before_calibrate() -> None:
    with pytest.raises(RuntimeError, match="call calibrate"):
        ffcp.FCP(leaky(), "0").predict_interval(X)
    with pytest.raises(RuntimeError, match="number of steps is not chosen yet"):
        ffcp.FCP(leaky(), "0").score(X, torch.zeros(200))


def test_the_model_is_left_in_its_mode() -> None:
    model = small_mlp().train()
    ffcp.FCP(model, "0", steps=3).calibrate(X, torch.zeros(200)).predict_interval(NEW)
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


# -- quantile regression -----------------------------------------------------------------------


def test_cqr_is_the_published_formula() -> None:
    model, y = leaky(2), normal(200, seed=9)
    low, high = model(X).detach().double().sort(dim=1).values.T
    scores = torch.maximum(low - y, y - high)
    q = scores.sort().values[math.ceil(201 * 0.9) - 1]
    predictor = ffcp.CQR(model).calibrate(X, y)
    torch.testing.assert_close(predictor.score(X, y), scores)
    band = predictor.predict_interval(NEW)
    low, high = model(NEW).detach().double().sort(dim=1).values.T
    torch.testing.assert_close(band.lower.double(), low - q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(band.upper.double(), high + q, rtol=1e-5, atol=1e-6)


def test_ffcqr_divides_each_side_by_its_own_norm() -> None:
    model, y = leaky(2), normal(200, seed=9)
    prediction, norms = ffcp.gradient_norms(model, X, ["0"])
    order = prediction.argsort(dim=1)
    ends = prediction.gather(1, order).double()
    slack = norms["0"].gather(1, order).double()
    expected = torch.maximum((ends[:, 0] - y) / slack[:, 0], (y - ends[:, 1]) / slack[:, 1])
    torch.testing.assert_close(ffcp.FFCQR(model, "0").score(X, y), expected)


def test_ffcqr_at_the_output_is_cqr() -> None:
    model, y = leaky(2), normal(200, seed=9)
    a = ffcp.CQR(model).calibrate(X, y).predict_interval(NEW)
    b = ffcp.FFCQR(model, "output").calibrate(X, y).predict_interval(NEW)
    torch.testing.assert_close(a, b)


def test_ffcqr_chooses_its_layer() -> None:
    model, y = leaky(2), normal(200, seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.FFCQR(model).calibrate(X, y)
    assert predictor.choice.rows == 40
    assert predictor.feature in predictor.choice.candidates


def test_both_norms_come_from_one_backward_pass() -> None:
    model = leaky(2)
    passes = []

    class Counted(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output) -> None:
            pass

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            passes.append(1)
            return gradient

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return Counted.apply(self.inner(x))

    _, norms = ffcp.gradient_norms(Watched(), X, ["inner.0"])
    assert len(passes) == 1
    torch.testing.assert_close(norms["inner.0"], ffcp.gradient_norms(model, X, ["0"])[1]["0"])


def test_several_targets_with_two_quantiles_each() -> None:
    model = nn.Sequential(leaky(6), nn.Unflatten(1, (3, 2)))
    y = normal(200, 3, seed=4)
    for predictor in (ffcp.CQR(model), ffcp.FFCQR(model, "0.0")):
        band = predictor.calibrate(X, y).predict_interval(NEW)
        assert band.lower.shape == band.prediction.shape == (50, 3)
        assert (band.lower <= band.upper).all()


def test_crossed_quantiles_give_the_band_of_the_ordered_ones() -> None:
    model, y = leaky(2), normal(200, seed=9)
    flipped = nn.Sequential(*model[:-1], nn.Linear(8, 2))
    flipped[-1].load_state_dict({k: v.flip(0) for k, v in model[-1].state_dict().items()})
    for make in (ffcp.CQR, lambda m: ffcp.FFCQR(m, "0"), lambda m: ffcp.FCQR(m, "0", steps=5)):
        a = make(model).calibrate(X, y).predict_interval(NEW)
        b = make(flipped).calibrate(X, y).predict_interval(NEW)
        torch.testing.assert_close(a, b)


def test_a_band_that_shrinks_to_nothing_is_a_point() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x[:, 0].abs() * -1, x[:, 0].abs()], dim=1) + 0 * x[:, :1]

    wide = torch.full((100, 1), 50.0)
    predictor = ffcp.CQR(Wide()).calibrate(wide, torch.zeros(100))
    assert predictor.calibration.threshold(0.1) == -50
    band = predictor.predict_interval(torch.tensor([[1.0], [60.0]]))
    assert band.lower[0] == band.upper[0] == 0
    torch.testing.assert_close(band.upper[1], torch.tensor(10.0))


def test_fcqr_never_shrinks_below_the_quantiles() -> None:
    model = leaky(2)
    y = model(X).detach().mean(dim=1)  # in the middle: every score is negative
    predictor = ffcp.FCQR(model, "0", steps=5).calibrate(X, y)
    assert (predictor.calibration.scores < 0).all()
    band = predictor.predict_interval(NEW)
    ends = model(NEW).detach().sort(dim=1).values
    torch.testing.assert_close(torch.stack(band[:2], dim=1), ends)


def test_pinball_loss_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 levels but 3 quantiles"):
        ffcp.pinball_loss(torch.zeros(5, 3), torch.zeros(5))
    with pytest.raises(ValueError, match=r"target has shape \(4,\), quantiles \(5, 2\)"):
        ffcp.pinball_loss(torch.zeros(5, 2), torch.zeros(4))


@pytest.mark.parametrize("bound", ["ibp", "crown"])
def test_bands_of_smaller_alpha_hold_those_of_larger(bound: str) -> None:
    model = leaky()
    predictor = ffcp.FCP(model, "0", invert="exact", bound=bound).calibrate(X, targets(model, X))
    wide, narrow = (predictor.predict_interval(NEW, alpha=a) for a in (0.05, 0.5))
    assert (wide.lower <= narrow.lower + 1e-6).all()
    assert (wide.upper >= narrow.upper - 1e-6).all()
