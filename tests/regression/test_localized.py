"""Localized methods: honest bandwidths, and clear words on thin places."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ffcp
from tests.conftest import normal, small_mlp
from tests.core import set_aside, threshold

X, Y = normal(300, 4, seed=0), normal(300, seed=1)


def at_input(kernel: str = "gaussian", bandwidth: float | str = "auto") -> ffcp.kernels.Localizer:
    return ffcp.kernels.Localizer(kernel, "input", bandwidth)


METHODS = {
    "LCP": lambda localizer, **more: ffcp.LCP(small_mlp(), localizer, **more),
    "FFLCP": lambda localizer, **more: ffcp.FFLCP(small_mlp(), "0", localizer, **more),
    "LCQR": lambda localizer, **more: ffcp.LCQR(small_mlp(outputs=2), localizer, **more),
    "FFLCQR": lambda localizer, **more: ffcp.FFLCQR(
        small_mlp(outputs=2), "3", localizer, **more
    ),
}  # fmt: skip


def test_a_huge_bandwidth_is_plain_conformal_prediction() -> None:
    plain = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X[:20])
    for kernel in ("gaussian", "laplace", "box"):
        local = ffcp.LCP(
            small_mlp(), at_input(kernel, bandwidth=1e6), guarantee="none"
        ).calibrate(X, Y)  # fmt: skip
        assert torch.equal(local.predict_interval(X[:20]).upper, plain.upper)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box", "nearest"])
def test_bands_are_the_formula_at_the_local_threshold(method: str, kernel: str) -> None:
    bandwidth = 40 if kernel == "nearest" else 4.0
    predictor = METHODS[method](at_input(kernel, bandwidth=bandwidth), guarantee="none")
    predictor.calibrate(X[:200], Y[:200])
    band = predictor.predict_interval(X[200:])
    scores = predictor.score(X[200:], Y[200:])
    level = threshold(predictor.calibration, 0.1, {"embedding": X[200:]})[:, 0]
    y = Y[200:].view_as(band.lower)
    inside = ((band.lower <= y) & (y <= band.upper)).reshape(-1)
    assert torch.equal(inside, scores.reshape(-1) <= level)
    assert len(band.lower.unique()) > 10


@pytest.mark.parametrize(
    "on", ["input", "prediction", "0", "feature", lambda x: x[:, 1], lambda x: x[:, :2].numpy()]
)
def test_embeddings(on) -> None:
    model = small_mlp()
    localizer = ffcp.kernels.Localizer("box", on=on, bandwidth=1.0)
    predictor = ffcp.FFLCP(model, "3", localizer, guarantee="none").calibrate(X, Y)
    expected = {
        "input": X,
        "prediction": model.eval()(X),
        "0": model[0](X),
        "feature": model[:4](X),
    }
    wanted = expected[on] if isinstance(on, str) else torch.as_tensor(on(X)).reshape(300, -1)
    torch.testing.assert_close(predictor.calibration.embedding, wanted.detach())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        band = predictor.predict_interval(X[:50])
    level = threshold(predictor.calibration, 0.1, {"embedding": wanted[:50].detach()})
    assert torch.equal(band.upper.isinf(), level.isinf()[:, 0])


def test_a_loader_calibrates_as_arrays_do() -> None:
    localizer = ffcp.kernels.Localizer("gaussian", on="prediction")
    whole = ffcp.FFLCP(small_mlp(), "0", localizer).calibrate(X, Y)
    stream = ffcp.FFLCP(small_mlp(), "0", localizer).calibrate(
        (X[i : i + 37], Y[i : i + 37]) for i in range(0, 300, 37)
    )
    assert stream.bandwidth == pytest.approx(whole.bandwidth)
    torch.testing.assert_close(stream.calibration.scores, whole.calibration.scores)
    torch.testing.assert_close(stream.calibration.embedding, whole.calibration.embedding)


def test_the_bandwidth_is_chosen_on_rows_that_do_not_calibrate() -> None:
    mask = set_aside(300)
    one = ffcp.LCP(small_mlp(), at_input()).calibrate(X, Y)
    assert len(one.calibration) == 240
    assert torch.equal(one.calibration.embedding, X[~mask])
    other = torch.where(mask, Y, 1e6 * normal(300, seed=9))
    two = ffcp.LCP(small_mlp(), at_input()).calibrate(X, other)
    assert two.bandwidth_choice == one.bandwidth_choice


def test_feature_and_bandwidth_are_chosen_on_the_same_rows() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.FFLCP(small_mlp(), "auto", at_input()).calibrate(X, Y)
    left = ~set_aside(300)
    assert predictor.choice.rows == predictor.bandwidth_choice.rows == 60
    assert torch.equal(predictor.calibration.embedding, X[left])
    named = ffcp.FFLCP(small_mlp(), predictor.feature, at_input(bandwidth=1.0))
    named.calibrate(X[left], Y[left])
    torch.testing.assert_close(predictor.calibration.scores, named.calibration.scores)


def test_fit_localizer_leaves_all_rows_to_calibrate() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input()).fit_localizer(X[:150], Y[:150], planned=150)
    before = predictor.bandwidth
    predictor.calibrate(X[150:], Y[150:])
    assert len(predictor.calibration) == 150
    assert predictor.bandwidth == before
    assert predictor.bandwidth_choice.rows == 150
    assert f"bandwidth {before:.4g}" in str(predictor.bandwidth_choice)
    smooth = X[:, 0].abs()  # the noise changes with x: another bandwidth
    predictor.fit_localizer(X, smooth * Y, planned=5000)
    assert len(predictor.calibration) == 150
    assert predictor.bandwidth == before  # until it calibrates again
    predictor.calibrate(X[150:], Y[150:])
    assert predictor.bandwidth != before
    assert predictor.bandwidth_choice.rows == 300


def test_constant_embeddings_do_no_harm() -> None:
    localizer = ffcp.kernels.Localizer("gaussian", on=lambda x: torch.zeros(len(x)))
    band = ffcp.LCP(small_mlp(), localizer).calibrate(X, Y).predict_interval(X[:5])
    assert band.upper.isfinite().all()


def test_update_and_merge_add_points() -> None:
    localizer = at_input(bandwidth=2.0)
    whole = ffcp.LCP(small_mlp(), localizer).calibrate(X, Y).predict_interval(X[:9])
    grown = ffcp.LCP(small_mlp(), localizer).calibrate(X[:100], Y[:100])
    grown.predict_interval(X[:9])  # works out a level that must not be kept
    grown.calibrate(X[100:], Y[100:], update=True)
    torch.testing.assert_close(grown.predict_interval(X[:9]).upper, whole.upper)
    merged = ffcp.LCP(small_mlp(), localizer).calibrate(X[:100], Y[:100])
    merged.merge(ffcp.LCP(small_mlp(), localizer).calibrate(X[100:], Y[100:]))
    torch.testing.assert_close(merged.predict_interval(X[:9]).upper, whole.upper)
    with pytest.raises(ValueError, match="bandwidth"):
        merged.merge(ffcp.LCP(small_mlp(), at_input(bandwidth=3.0)).calibrate(X, Y))


@pytest.mark.parametrize("method", METHODS)
def test_saved_and_loaded(method: str, tmp_path: Path) -> None:
    path = tmp_path / "local.safetensors"
    predictor = METHODS[method](at_input()).calibrate(X, Y)
    predictor.save(path)
    loaded = METHODS[method](at_input()).load(path)
    assert loaded.bandwidth_choice == predictor.bandwidth_choice
    band, again = predictor.predict_interval(X[:30]), loaded.predict_interval(X[:30])
    assert torch.equal(band.upper, again.upper)
    assert loaded.bandwidth == predictor.bandwidth
    assert f"bandwidth={predictor.bandwidth:.4g}" in repr(loaded)
    with pytest.raises(ValueError, match="kernel"):
        METHODS[method](at_input("box")).load(path)


def test_moving_the_predictor_leaves_the_points_alone() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input(bandwidth=2.0)).calibrate(X, Y).double()
    assert predictor.calibration.embedding.dtype == torch.float32
    with pytest.raises(RuntimeError, match="weights"):
        predictor.predict_interval(X[:5].double())


def test_random_bands_depend_on_the_seed_alone() -> None:
    def band(seed: int) -> Tensor:
        localizer = at_input("laplace", bandwidth=3.0)
        predictor = ffcp.LCP(small_mlp(), localizer, guarantee="random", seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            return predictor.calibrate(X, Y).predict_interval(X[:50]).upper

    assert torch.equal(band(1), band(1))
    assert not torch.equal(band(1), band(2))


def test_works_under_inference_mode() -> None:
    model = small_mlp()
    with torch.inference_mode():
        predictor = ffcp.FFLCP(model, "0", ffcp.kernels.Localizer(on="0")).calibrate(X, Y)
        band = predictor.predict_interval(X[:5])
    assert band.upper.isfinite().all()
    assert not predictor.calibration.embedding.is_inference()


# -- thin neighbourhoods and other trouble -----------------------------------------------------


@pytest.mark.parametrize("guarantee", ["none", "level"])
@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_infinite_bands_are_counted_and_the_advice_helps(kernel: str, guarantee: str) -> None:
    far = torch.cat([X[:20], 30 + X[20:25]])
    small = at_input(kernel, bandwidth=4.0)
    predictor = ffcp.LCP(small_mlp(), small, guarantee=guarantee).calibrate(X, Y)
    with pytest.warns(ffcp.FFCPWarning, match="5 of 25"):
        band = predictor.predict_interval(far)
    assert band.upper.isinf().sum() == 5
    wide = at_input(kernel, bandwidth=predictor.bandwidth_for(far))
    again = ffcp.LCP(small_mlp(), wide, guarantee=guarantee).calibrate(X, Y)
    assert again.predict_interval(far).upper.isfinite().all()


@pytest.mark.parametrize("guarantee", ["none", "level"])
def test_too_few_neighbours(guarantee: str) -> None:
    few = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=5), guarantee=guarantee)
    advised = few.calibrate(X, Y).bandwidth_for(X[:10])
    with pytest.warns(ffcp.FFCPWarning, match=f"bandwidth={advised:g}"):
        few.predict_interval(X[:10])
    enough = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=advised), guarantee=guarantee)
    assert enough.calibrate(X, Y).predict_interval(X[:10]).upper.isfinite().all()


def test_the_advice_on_neighbours_looks_at_every_output() -> None:
    x = torch.linspace(0, 1, 300)[:, None]
    y = torch.cat([normal(300, 1, seed=0), (8 * x).exp() * normal(300, 1, seed=1)], dim=1)
    model = nn.Linear(1, 2)
    few = ffcp.LCP(model, at_input("nearest", bandwidth=5)).calibrate(x, y)
    advised = few.bandwidth_for(x)
    with pytest.warns(ffcp.FFCPWarning, match="bandwidth="):
        few.predict_interval(x)
    enough = ffcp.LCP(model, at_input("nearest", bandwidth=advised)).calibrate(x, y)
    assert enough.predict_interval(x).upper.isfinite().all()


def test_too_few_points_for_any_bandwidth() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input(bandwidth=9.0)).calibrate(X[:8], Y[:8])
    with pytest.warns(ffcp.FFCPWarning, match=r"\b8\b"):
        band = predictor.predict_interval(X[:3])
    assert band.upper.isinf().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ffcp.kernels.Localizer("cosine"),
            "cosine",
        ),
        (lambda: at_input(bandwidth=0), "bandwidth"),
        (lambda: at_input(bandwidth=math.nan), "bandwidth"),
        (lambda: at_input(bandwidth="wide"), "bandwidth"),
        (lambda: at_input("nearest", bandwidth=2.5), "2.5"),
        (lambda: METHODS["LCP"]("gaussian", guarantee="sure"), "sure"),
        (lambda: METHODS["LCP"]("nearest", guarantee="random"), "nearest"),
        (
            lambda: METHODS["LCP"](ffcp.kernels.Localizer(on="feature")),
            "feature",
        ),
        (lambda: METHODS["LCP"](ffcp.kernels.Localizer(on="layer9")), "layer9"),
        (
            lambda: ffcp.FFLCP(small_mlp(), "auto", ffcp.kernels.Localizer(on="feature")),
            "feature",
        ),
        (lambda: METHODS["LCP"]("gaussian", selection_fraction=1.0), "selection_fraction"),
    ],
)
def test_refused_settings(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_refused_types() -> None:
    with pytest.raises(TypeError, match="Localizer"):
        ffcp.LCP(small_mlp(), 0.5)
    with pytest.raises(TypeError, match=r"\bon\b"):
        ffcp.kernels.Localizer(on=3)


def test_refused_data() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=400))
    with pytest.raises(ValueError, match=r"\b400\b"):
        predictor.calibrate(X, Y).predict_interval(X[:3])
    with pytest.raises(ValueError, match="finite"):
        ffcp.LCP(small_mlp(), ffcp.kernels.Localizer(on=lambda x: x / 0 * 0)).calibrate(X, Y)
    with pytest.raises(ValueError, match="shape"):
        ffcp.LCP(small_mlp(), ffcp.kernels.Localizer(on=lambda x: torch.zeros(7))).calibrate(X, Y)
    with pytest.raises(ValueError, match="bandwidth"):
        ffcp.LCP(small_mlp(), at_input()).calibrate(X[:9], Y[:9])
    with pytest.raises(ValueError, match="bandwidth"):
        ffcp.LCP(small_mlp(), at_input(bandwidth=1.0)).fit_localizer(X, Y)
    with pytest.raises(RuntimeError, match="calibrate"):
        ffcp.LCP(small_mlp(), at_input()).predict_interval(X)
    with pytest.raises(RuntimeError, match="feature"):
        ffcp.FFLCP(small_mlp()).fit_localizer(X, Y)
    changing = ffcp.kernels.Localizer(on=lambda x: x[:, : 3 if len(x) == 300 else 2], bandwidth=1.0)
    with pytest.raises(ValueError, match=r"\b3\b"):
        ffcp.LCP(small_mlp(), changing).calibrate(X, Y).predict_interval(X[:5])


def test_neighbours_beyond_a_group_are_refused_with_its_name() -> None:
    groups = ["few"] * 30 + ["many"] * 270
    given = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=50))
    given.calibrate(X, Y, groups=groups)
    with pytest.raises(ValueError, match="few"):
        given.predict_interval(X[:3], groups=groups[:3])


def test_a_chosen_number_of_neighbours_is_all_points_of_a_smaller_group() -> None:
    groups = ["few"] * 30 + ["many"] * 270
    predictor = ffcp.LCP(small_mlp(), at_input("nearest")).calibrate(X, Y, groups=groups)
    few = predictor.calibration.groups["few"]
    assert predictor.bandwidth > few
    alone = ffcp.CP(small_mlp()).calibrate(X, Y, groups=groups)
    assert predictor.predict_interval(X[:3], groups=groups[:3]).upper.isfinite().all()
    assert alone.predict_interval(X[:3], groups=groups[:3]).upper.isfinite().all()


def test_points_so_far_apart_that_no_weight_is_enough() -> None:
    torch.manual_seed(95)
    x = torch.exp(8 * torch.randn(80, 2))
    y = torch.randn(80)
    predictor = ffcp.LCP(nn.Linear(2, 1), at_input(bandwidth=0.5)).calibrate(x[:60], y[:60])
    with pytest.warns(ffcp.FFCPWarning, match="infinite"):
        band = predictor.predict_interval(x[60:])
    assert band.upper.isinf().any()


def test_a_failed_calibration_changes_nothing() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input()).calibrate(X, Y)
    before = predictor.predict_interval(X[:9]).upper
    with pytest.raises(ValueError, match="rows"):
        predictor.calibrate(X[:9], Y[:9])
    assert torch.equal(predictor.predict_interval(X[:9]).upper, before)


def test_several_outputs_and_joint() -> None:
    y = normal(300, 3, seed=8)
    localizer = at_input(bandwidth=3.0)
    apart = ffcp.LCP(small_mlp(outputs=3), localizer).calibrate(X, y)
    joint = ffcp.LCP(small_mlp(outputs=3), localizer, joint=True).calibrate(X, y)
    a, b = apart.predict_interval(X[:9]), joint.predict_interval(X[:9])
    assert a.upper.shape == b.upper.shape == (9, 3)
    assert ((b.upper - b.lower) >= (a.upper - a.lower)).double().mean() > 0.9


def test_a_model_of_images() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 1))
    images = normal(120, 1, 8, 8, seed=0)
    predictor = ffcp.FFLCP(model, "0", ffcp.kernels.Localizer(on="feature")).calibrate(
        images, Y[:120]
    )
    assert predictor.calibration.embedding.shape == (96, 72)
    assert predictor.predict_interval(images[:4]).upper.shape == (4,)


# -- inputs of several tensors -----------------------------------------------------------------


class Sum(nn.Module):
    """Takes two tensors, in a tuple or by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 1), nn.Linear(3, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a).tanh() + self.two(b).tanh()


@pytest.mark.parametrize("on", ["input", "prediction"])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("bandwidth", [2.0, "auto"])
def test_an_input_of_two_tensors(kind: str, on: str, bandwidth: float | str) -> None:
    model, parts = Sum(), (normal(300, 2, seed=0), normal(300, 3, seed=1))
    x = parts if kind == "tuple" else dict(zip("ab", parts, strict=True))
    new = (x[0][:9], x[1][:9]) if kind == "tuple" else {key: x[key][:9] for key in x}
    localizer = ffcp.kernels.Localizer("gaussian", on=on, bandwidth=bandwidth)
    predictor = ffcp.LCP(model, localizer).calibrate(x, Y)
    kept = len(predictor.calibration)
    assert kept == (240 if bandwidth == "auto" else 300)
    wanted = torch.cat(parts, dim=1) if on == "input" else model(*parts).detach()
    if kept == 300:
        torch.testing.assert_close(predictor.calibration.embedding, wanted)
    assert predictor.calibration.embedding.shape == (kept, 5 if on == "input" else 1)
    assert predictor.predict_interval(new).upper.shape == (9,)


# -- several outputs at once -------------------------------------------------------------------


@pytest.mark.parametrize("method", ["LCP", "FFLCP"])
def test_bonferroni_is_each_output_at_a_share_of_alpha(method: str) -> None:
    def make(joint: str | bool) -> ffcp.IntervalPredictor:
        model, localizer = small_mlp(outputs=3), at_input(bandwidth=4.0)
        if method == "LCP":
            return ffcp.LCP(model, localizer, joint=joint)
        return ffcp.FFLCP(model, "0", localizer, joint=joint)

    y = normal(300, 3, seed=8)
    together = make("bonferroni").calibrate(X, y).predict_interval(X[:9], alpha=0.3)
    apart = make(False).calibrate(X, y).predict_interval(X[:9], alpha=0.1)
    assert torch.equal(together.upper, apart.upper)


@pytest.mark.long
def test_the_bandwidth_is_chosen_for_the_level_that_bonferroni_needs() -> None:
    # 0.1 / 3 asks for 29 neighbours; at 0.1 itself 9 would do.
    x = torch.linspace(0, 1, 2000)[:, None]
    y = (1 + 10 * (x > 0.5)) * normal(2000, 3, seed=0)
    model = nn.Linear(1, 3)
    near = ffcp.LCP(model, at_input("nearest"), joint="bonferroni").calibrate(x, y)
    assert near.bandwidth >= 29
    assert near.bandwidth_choice.alpha == pytest.approx(0.1 / 3)
    assert near.predict_interval(x).upper.isfinite().all()


# -- groups ------------------------------------------------------------------------------------

GROUPS = ["left" if x < 0 else "right" for x in X[:, 0].tolist()]


@pytest.mark.parametrize("guarantee", ["none", "level", "random"])
@pytest.mark.parametrize("method", METHODS)
def test_thresholds_are_local_inside_each_group(method: str, guarantee: str) -> None:
    def make() -> ffcp.IntervalPredictor:
        return METHODS[method](at_input(bandwidth=5.0), guarantee=guarantee, seed=3)

    predictor = make().calibrate(X, Y, groups=GROUPS)
    for label in ("left", "right"):
        inside = torch.tensor([group == label for group in GROUPS])
        alone = make().calibrate(X[inside], Y[inside])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ffcp.FFCPWarning)
            band = predictor.predict_interval(
                X[inside], groups=[label] * int(inside.sum()), first_row=0
            )
            expected = alone.predict_interval(X[inside], first_row=0)
        torch.testing.assert_close(band, expected)
        assert len(band.upper.unique()) > 10


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_groups_and_a_chosen_bandwidth_survive_saving(method: str, tmp_path: Path) -> None:
    path = tmp_path / "local.safetensors"
    predictor = METHODS[method](at_input()).calibrate(X, Y, groups=GROUPS)
    predictor.save(path)
    loaded = METHODS[method](at_input()).load(path)
    assert loaded.bandwidth_choice == predictor.bandwidth_choice
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        band, again = (p.predict_interval(X, groups=GROUPS) for p in (predictor, loaded))
    assert torch.equal(band.upper, again.upper)


def test_thin_places_in_a_group_are_told_with_its_name_and_advice_that_helps() -> None:
    far = torch.cat([X[:20], 30 + X[20:25]])
    labels = [*GROUPS[:20], *["left"] * 5]
    predictor = ffcp.LCP(small_mlp(), at_input("box", bandwidth=6.0))
    predictor.calibrate(X, Y, groups=GROUPS)
    with pytest.warns(ffcp.FFCPWarning, match="left"):
        predictor.predict_interval(far, groups=labels)
    wide = ffcp.LCP(small_mlp(), at_input("box", bandwidth=predictor.bandwidth_for(far[20:])))
    wide.calibrate(X, Y, groups=GROUPS)
    assert wide.predict_interval(far, groups=labels).upper.isfinite().all()


def test_a_group_too_small_for_any_bandwidth_is_told_with_its_size() -> None:
    groups = ["few"] * 5 + ["many"] * 295
    predictor = ffcp.LCP(small_mlp(), at_input(bandwidth=9.0)).calibrate(X, Y, groups=groups)
    with pytest.warns(ffcp.FFCPWarning, match="few"):
        band = predictor.predict_interval(X[:10], groups=groups[:10])
    assert band.upper[:5].isinf().all()
    assert band.upper[5:].isfinite().all()
    assert predictor.bandwidth_for(X[:5]) is None


def test_where_points_lie_does_not_change_with_the_data_they_came_from() -> None:
    x, y = normal(200, 1, seed=1), normal(200, seed=2)
    near = ffcp.kernels.Localizer("box", on="input", bandwidth=0.5)
    predictor = ffcp.LCP(nn.Linear(1, 1), localizer=near).calibrate(x, y)
    before = predictor.calibration.embedding.clone()
    x += 100
    assert torch.equal(predictor.calibration.embedding, before)
