"""Localized thresholds: exact weighted quantiles, honest bandwidths, clear words on thin places."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ffcp
from ffcp import localize
from ffcp.choose import RowSplit
from ffcp.conformal.rank import conformal_rank
from ffcp.localize import ONE, LocalStore
from ffcp.quantiles import RunningSums
from tests.conftest import normal, small_mlp

X, Y = normal(300, 4, seed=0), normal(300, seed=1)


def at_input(kernel: str = "gaussian", bandwidth: float | str = "auto") -> ffcp.Localizer:
    return ffcp.Localizer(kernel, "input", bandwidth)


METHODS = {
    "LCP": lambda localizer, **more: ffcp.LCP(small_mlp(), localizer, **more),
    "FFLCP": lambda localizer, **more: ffcp.FFLCP(small_mlp(), "0", localizer, **more),
    "LCQR": lambda localizer, **more: ffcp.LCQR(small_mlp(outputs=2), localizer, **more),
    "FFLCQR": lambda localizer, **more: ffcp.FFLCQR(
        small_mlp(outputs=2), "3", localizer, **more
    ),
}  # fmt: skip


# -- running sums ------------------------------------------------------------------------------


@given(
    st.integers(1, 400),
    st.integers(1, 3),
    st.integers(0, 10**6),
    st.sampled_from([1, 3, ONE]),
)
def test_running_sums_equal_brute_force(n: int, columns: int, seed: int, largest: int) -> None:
    random = np.random.default_rng(seed)
    weights = random.integers(0, largest, (n, columns), endpoint=True)
    weights[random.random((n, columns)) < 0.4] = 0
    sums = RunningSums(torch.from_numpy(weights).int())
    running = np.cumsum(weights, axis=0)
    assert sums.total.tolist() == running[-1].tolist()
    target = random.integers(1, max(2, 1.2 * running[-1].max()), columns)
    expected = [int(np.searchsorted(running[:, j], target[j])) for j in range(columns)]
    assert sums.reach(torch.from_numpy(target)).tolist() == expected
    row = random.integers(0, n, columns, endpoint=True)
    before = [int(weights[: row[j], j].sum()) for j in range(columns)]
    assert sums.before(torch.from_numpy(row)).tolist() == before


# -- thresholds against a reference in fractions -----------------------------------------------


def reference(
    scores: list[float], weights: list[Fraction], alpha: Fraction, level: Fraction | None = None
) -> float:
    """The localized quantile by its definition; the point itself weighs 1, at infinity."""
    total = sum(weights) + 1
    running = Fraction(0)
    for score, weight in sorted(zip(scores, weights, strict=True)):
        running += weight
        # Plain: reaches the share 1 - alpha. Recalibrated: exceeds the level.
        if (running >= (1 - alpha) * total) if level is None else (running > level * total):
            return score
    return math.inf


def exact_weights(kernel: str, bandwidth: float, x: float, points: list[float]) -> list[Fraction]:
    """Weights as the library rounds them: to multiples of 2**-23."""
    if kernel == "nearest":
        order = sorted(range(len(points)), key=lambda i: (abs(points[i] - x), i))
        near = set(order[: int(bandwidth)])
        return [Fraction(int(i in near)) for i in range(len(points))]
    squared = torch.tensor([[((p - x) / bandwidth) ** 2 for p in points]])
    rounded = localize.whole(localize.log_kernel(kernel, squared))[0]
    return [Fraction(int(w), ONE) for w in rounded]


def reference_level(
    scores: list[float], weights: list[list[Fraction]], alpha: Fraction
) -> Fraction | None:
    """The k-th smallest of (a_i + 1) / (b_i + 1)."""
    bounds = sorted(
        (sum((w for w, s in zip(row, scores, strict=True) if s < score), Fraction(0)) + 1)
        / (sum(row) + 1)
        for score, row in zip(scores, weights, strict=True)
    )
    k = conformal_rank(len(scores), alpha)
    return bounds[k - 1] if k <= len(scores) else None


# Whole numbers, so that distances come out exactly and ties are real.
places = st.integers(-6, 6).map(float)
values = st.one_of(st.integers(0, 4).map(float), st.just(math.inf))


@given(
    points=st.lists(st.tuples(values, places), min_size=1, max_size=40),
    asked=st.lists(places, min_size=1, max_size=4),
    kernel=st.sampled_from(["gaussian", "laplace", "box"]),
    bandwidth=st.sampled_from([0.05, 1.0, 3.0, 100.0]),
    alpha=st.sampled_from([Fraction(1, 10), Fraction(1, 4), Fraction(1, 2), Fraction(7, 10)]),
    guarantee=st.sampled_from(["none", "level"]),
)
def test_thresholds_equal_brute_force(
    points: list[tuple[float, float]],
    asked: list[float],
    kernel: str,
    bandwidth: float,
    alpha: Fraction,
    guarantee: str,
) -> None:
    scores, where = (list(column) for column in zip(*points, strict=True))
    store = LocalStore()
    store.replace(torch.tensor(scores)[:, None], torch.tensor(where)[:, None])
    found = store.threshold(alpha, torch.tensor(asked)[:, None], kernel, bandwidth, guarantee)
    level = None
    if guarantee == "level":
        rows = [exact_weights(kernel, bandwidth, x, where) for x in where]
        level = reference_level(scores, rows, alpha) or Fraction(2)
    expected = [
        reference(scores, exact_weights(kernel, bandwidth, x, where), alpha, level) for x in asked
    ]
    assert found[:, 0].tolist() == expected


@given(
    scores=st.lists(values, min_size=3, max_size=30),
    k=st.integers(1, 30),
    asked=st.lists(st.floats(-10, 40), min_size=1, max_size=4),
    alpha=st.sampled_from([Fraction(1, 10), Fraction(1, 4), Fraction(1, 2)]),
    line=st.booleans(),
)
def test_nearest_neighbours_equal_brute_force(
    scores: list[float], k: int, asked: list[float], alpha: Fraction, line: bool
) -> None:
    k = min(k, len(scores))
    where = [i + 0.01 * i * i for i in range(len(scores))]  # no two distances alike
    width = 1 if line else 12
    store = LocalStore()
    embedding = torch.tensor(where)[:, None].expand(-1, width)
    store.replace(torch.tensor(scores)[:, None], embedding)
    x = torch.tensor(asked)[:, None].expand(-1, width)
    found = store.threshold(alpha, x, "nearest", k, "none")
    exact = [float(v) for v in torch.tensor(asked)]
    expected = [
        reference(scores, exact_weights("nearest", k, x, where), alpha) for x in exact
    ]  # fmt: skip
    assert found[:, 0].tolist() == expected


def test_the_level_of_nearest_neighbours_equals_its_definition() -> None:
    scores, where = normal(60, 1, seed=3).double(), normal(60, 2, seed=4)
    store = LocalStore()
    store.replace(scores, where)
    k = 12
    level = store.level(store.around("nearest", k), 0)
    bounds = []
    for i in range(60):
        distance = (where - where[i]).norm(dim=1)
        distance[i] = -1
        others = distance.argsort()[1:k]  # k - 1 of them, not itself
        bounds.append((int((scores[others] < scores[i]).sum()) + 1) / (k + 1))
    assert (level.numerators / level.denominators).tolist() == pytest.approx(sorted(bounds))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("guarantee", ["none", "level", "random"])
def test_blocks_change_nothing(
    monkeypatch: pytest.MonkeyPatch, guarantee: str, outputs: int
) -> None:
    store, x = LocalStore(), normal(90, 3, seed=7)
    store.replace(normal(700, outputs, seed=5), normal(700, 3, seed=6))

    def thresholds() -> Tensor:
        store._known = {}
        random = np.random.default_rng(0)
        return store.threshold(0.1, x, "gaussian", 1.0, guarantee, random)

    whole = thresholds()
    for name in ("_BLOCK", "_CACHE", "_ROWS"):
        monkeypatch.setattr(localize, name, 100)
    monkeypatch.setattr(localize, "_COLUMNS", (7, 11))
    assert torch.equal(thresholds(), whole)


def test_every_output_has_its_own_local_quantile() -> None:
    scores, where, x = normal(200, 2, seed=1), normal(200, 2, seed=2), normal(20, 2, seed=3)
    both, one, two = LocalStore(), LocalStore(), LocalStore()
    both.replace(scores, where)
    one.replace(scores[:, :1], where)
    two.replace(scores[:, 1:], where)
    for kernel, bandwidth in (("box", 1.0), ("nearest", 30)):
        for guarantee in ("none", "level"):
            found = both.threshold(0.2, x, kernel, bandwidth, guarantee)
            parts = [s.threshold(0.2, x, kernel, bandwidth, guarantee) for s in (one, two)]
            assert torch.equal(found, torch.cat(parts, dim=1))


def test_a_huge_bandwidth_is_plain_conformal_prediction() -> None:
    plain = ffcp.CP(small_mlp()).calibrate(X, Y).predict_interval(X[:20])
    for kernel in ("gaussian", "laplace", "box"):
        local = ffcp.LCP(
            small_mlp(), at_input(kernel, bandwidth=1e6), guarantee="none"
        ).calibrate(X, Y)  # fmt: skip
        assert torch.equal(local.predict_interval(X[:20]).upper, plain.upper)


def test_far_away_data_keeps_its_small_distances() -> None:
    # |a|^2 + |b|^2 - 2ab in single precision would lose them beside 1e6.
    where = 1e6 + torch.arange(8.0)[:, None]
    store = LocalStore()
    store.replace(torch.arange(8.0)[:, None], where)
    assert store.threshold(0.5, where, "box", 0.5, "none")[:, 0].tolist() == list(range(8))
    spread = torch.cat([where, torch.tensor([[-1e6]])])
    store.replace(torch.arange(9.0)[:, None], spread)
    assert store.threshold(0.5, spread, "box", 0.5, "none")[:, 0].tolist() == list(range(9))


def test_random_neighbours_are_drawn_from_the_kernel() -> None:
    # The mean squared length of a step: h^2 d, h^2 d (d + 1) and h^2 d / (d + 2).
    expected = {"gaussian": 3.0, "laplace": 12.0, "box": 3 / 5}
    for kernel, mean in expected.items():
        around = localize.Kernel(normal(5, 3, seed=0), [torch.arange(5)], kernel, 2.0)
        steps = around._draw(np.random.default_rng(0), 20_000, 3)
        assert float(steps.square().sum(dim=1).mean()) == pytest.approx(mean, rel=0.05)
        assert float(steps.mean().abs()) < 0.1


# -- the predictors ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernel", localize.KERNELS)
def test_bands_are_the_formula_at_the_local_threshold(method: str, kernel: str) -> None:
    bandwidth = 40 if kernel == "nearest" else 4.0
    predictor = METHODS[method](at_input(kernel, bandwidth=bandwidth), guarantee="none")
    predictor.calibrate(X[:200], Y[:200])
    band = predictor.predict_interval(X[200:])
    scores = predictor.score(X[200:], Y[200:])
    threshold = predictor.calibration.threshold(0.1, X[200:], kernel, bandwidth, "none")[:, 0]
    y = Y[200:].view_as(band.lower)
    inside = ((band.lower <= y) & (y <= band.upper)).reshape(-1)
    assert torch.equal(inside, scores.reshape(-1) <= threshold)
    assert len(band.lower.unique()) > 10


@pytest.mark.parametrize(
    "on", ["input", "prediction", "0", "feature", lambda x: x[:, 1], lambda x: x[:, :2].numpy()]
)
def test_embeddings(on) -> None:
    model = small_mlp()
    localizer = ffcp.Localizer("box", on=on, bandwidth=1.0)
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
    threshold = predictor.calibration.threshold(0.1, wanted[:50].detach(), "box", 1.0, "none")
    assert torch.equal(band.upper.isinf(), threshold.isinf())


def test_a_loader_calibrates_as_arrays_do() -> None:
    localizer = ffcp.Localizer("gaussian", on="prediction")
    whole = ffcp.FFLCP(small_mlp(), "0", localizer).calibrate(X, Y)
    stream = ffcp.FFLCP(small_mlp(), "0", localizer).calibrate(
        (X[i : i + 37], Y[i : i + 37]) for i in range(0, 300, 37)
    )
    assert stream.bandwidth == pytest.approx(whole.bandwidth)
    torch.testing.assert_close(stream.calibration.scores, whole.calibration.scores)
    torch.testing.assert_close(stream.calibration.embedding, whole.calibration.embedding)


def test_the_bandwidth_is_chosen_on_rows_that_do_not_calibrate() -> None:
    mask = RowSplit(0.2, seed=1).mask(300)
    one = ffcp.LCP(small_mlp(), at_input()).calibrate(X, Y)
    assert len(one.calibration) == 240
    assert torch.equal(one.calibration.embedding, X[~mask])
    other = torch.where(mask, Y, 1e6 * normal(300, seed=9))
    two = ffcp.LCP(small_mlp(), at_input()).calibrate(X, other)
    assert two.bandwidth_choice == one.bandwidth_choice


def test_feature_and_bandwidth_are_both_chosen_apart() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ffcp.FFCPWarning)
        predictor = ffcp.FFLCP(small_mlp(), "auto", at_input()).calibrate(X, Y)
    first = RowSplit(0.2, seed=0).mask(300)
    second = RowSplit(0.2, seed=1).mask(240)
    assert torch.equal(predictor.calibration.embedding, X[~first][~second])
    named = ffcp.FFLCP(small_mlp(), predictor.feature, at_input(bandwidth=1.0))
    named.calibrate(X[~first][~second], Y[~first][~second])
    torch.testing.assert_close(predictor.calibration.scores, named.calibration.scores)


def test_fit_localizer_leaves_all_rows_to_calibrate() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input()).fit_localizer(X[:150], Y[:150], planned=150)
    before = predictor.bandwidth
    predictor.calibrate(X[150:], Y[150:])
    assert len(predictor.calibration) == 150
    assert predictor.bandwidth == before
    assert predictor.bandwidth_choice.rows == 150
    assert f"bandwidth {before:.4g}" in str(predictor.bandwidth_choice)


def test_the_bandwidth_is_small_where_the_noise_changes_and_large_where_not() -> None:
    x = torch.linspace(0, 1, 1000)[:, None]
    noise = normal(1000, seed=2).abs().double()
    steps = torch.where(x[:, 0] < 0.5, 0.1, 1.0) * noise
    for kernel in ("gaussian", "laplace", "box"):
        chosen = [
            localize.choose_bandwidth(kernel, scores[:, None], x, 0.1, planned=4000).bandwidth
            for scores in (steps, noise)
        ]
        assert chosen[0] < 0.3 < 0.8 < chosen[1]
    near = [
        localize.choose_bandwidth("nearest", scores[:, None], x, 0.1, planned=4000).bandwidth
        for scores in (steps, noise)
    ]
    assert near[0] < 1000 < near[1]


def test_constant_embeddings_do_no_harm() -> None:
    localizer = ffcp.Localizer("gaussian", on=lambda x: torch.zeros(len(x)))
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
    with pytest.raises(ValueError, match=r"bandwidth=3.0 \(here 2.0\)"):
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
    assert f"bandwidth={predictor.bandwidth}" in repr(loaded)
    with pytest.raises(ValueError, match="kernel='gaussian' \\(here 'box'\\)"):
        METHODS[method](at_input("box")).load(path)


def test_moving_the_predictor_leaves_the_points_alone() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input(bandwidth=2.0)).calibrate(X, Y).double()
    assert predictor.calibration.embedding.dtype == torch.float32
    assert predictor.predict_interval(X[:5].double()).upper.dtype == torch.float64


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
        predictor = ffcp.FFLCP(model, "0", ffcp.Localizer(on="0")).calibrate(X, Y)
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
    with pytest.warns(ffcp.FFCPWarning, match="5 of 25 bands are infinite") as caught:
        band = predictor.predict_interval(far)
    assert band.upper.isinf().sum() == 5
    advised = float(str(caught[0].message).split("about ")[1].split()[0])
    wide = at_input(kernel, bandwidth=advised)
    again = ffcp.LCP(small_mlp(), wide, guarantee=guarantee).calibrate(X, Y)
    assert again.predict_interval(far).upper.isfinite().all()


@pytest.mark.parametrize("guarantee", ["none", "level"])
def test_too_few_neighbours(guarantee: str) -> None:
    few = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=5), guarantee=guarantee)
    with pytest.warns(ffcp.FFCPWarning, match="neighbours would do, instead of 5") as caught:
        few.calibrate(X, Y).predict_interval(X[:10])
    advised = int(str(caught[0].message).split("bandwidth=")[1].split()[0])
    enough = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=advised), guarantee=guarantee)
    assert enough.calibrate(X, Y).predict_interval(X[:10]).upper.isfinite().all()


def test_too_few_points_for_any_bandwidth() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input(bandwidth=9.0)).calibrate(X[:8], Y[:8])
    with pytest.warns(ffcp.FFCPWarning, match="more calibration points than the 8 there are"):
        band = predictor.predict_interval(X[:3])
    assert band.upper.isinf().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ffcp.Localizer("cosine"), "unknown kernel 'cosine': choose one of gaussian"),
        (lambda: at_input(bandwidth=0), "bandwidth must be a positive number or 'auto'"),
        (lambda: at_input(bandwidth=math.nan), "bandwidth must be a positive number"),
        (lambda: at_input(bandwidth="wide"), "bandwidth must be a positive number"),
        (lambda: at_input("nearest", bandwidth=2.5), "number of neighbours, a whole number"),
        (lambda: METHODS["LCP"]("gaussian", guarantee="sure"), "unknown guarantee 'sure'"),
        (lambda: METHODS["LCP"]("nearest", guarantee="random"), "'nearest' is none"),
        (lambda: METHODS["LCP"](ffcp.Localizer(on="feature")), "LCP takes none: name the layer"),
        (lambda: METHODS["LCP"](ffcp.Localizer(on="layer9")), "layer9.*there are"),
        (
            lambda: ffcp.FFLCP(small_mlp(), "auto", ffcp.Localizer(on="feature")),
            "needs one feature by its name",
        ),
        (lambda: METHODS["LCP"]("gaussian", choose_fraction=1.0), "choose_fraction must lie"),
    ],
)
def test_refused_settings(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make()


def test_refused_types() -> None:
    with pytest.raises(TypeError, match=r"must be an ffcp\.Localizer"):
        ffcp.LCP(small_mlp(), 0.5)
    with pytest.raises(TypeError, match="on must name an embedding"):
        ffcp.Localizer(on=3)


def test_refused_data() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input("nearest", bandwidth=400))
    with pytest.raises(ValueError, match="only 300 calibration points, fewer than the 400"):
        predictor.calibrate(X, Y).predict_interval(X[:3])
    with pytest.raises(ValueError, match="embedding holds nan in row 0"):
        ffcp.LCP(small_mlp(), ffcp.Localizer(on=lambda x: x / 0 * 0)).calibrate(X, Y)
    with pytest.raises(ValueError, match=r"embedding has shape \(7,\) for 300 rows"):
        ffcp.LCP(small_mlp(), ffcp.Localizer(on=lambda x: torch.zeros(7))).calibrate(X, Y)
    with pytest.raises(TypeError, match="LCP takes no groups"):
        ffcp.LCP(small_mlp(), at_input()).calibrate(X, Y, groups=["a"] * 300)
    with pytest.raises(ValueError, match="too few to choose a bandwidth"):
        ffcp.LCP(small_mlp(), at_input()).calibrate(X[:9], Y[:9])
    with pytest.raises(ValueError, match="the bandwidth is given"):
        ffcp.LCP(small_mlp(), at_input(bandwidth=1.0)).fit_localizer(X, Y)
    with pytest.raises(RuntimeError, match="no calibration"):
        ffcp.LCP(small_mlp(), at_input()).predict_interval(X)
    with pytest.raises(RuntimeError, match="feature is not chosen yet"):
        ffcp.FFLCP(small_mlp()).fit_localizer(X, Y)
    changing = ffcp.Localizer(on=lambda x: x[:, : 3 if len(x) == 300 else 2], bandwidth=1.0)
    with pytest.raises(ValueError, match="embeddings of 3 numbers, got 2"):
        ffcp.LCP(small_mlp(), changing).calibrate(X, Y).predict_interval(X[:5])


def test_a_failed_calibration_changes_nothing() -> None:
    predictor = ffcp.LCP(small_mlp(), at_input()).calibrate(X, Y)
    before = predictor.predict_interval(X[:9]).upper
    with pytest.raises(ValueError, match="too few to choose"):
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
    predictor = ffcp.FFLCP(model, "0", ffcp.Localizer(on="feature")).calibrate(images, Y[:120])
    assert predictor.calibration.embedding.shape == (96, 72)
    assert predictor.predict_interval(images[:4]).upper.shape == (4, 1)


def test_copies_of_a_point_do_not_count_it_among_its_own_neighbours() -> None:
    # Many copies of few places: a point is often not first in the list of its neighbours.
    where = torch.arange(6.0).repeat(10)[:, None]
    store = LocalStore()
    store.replace(normal(60, 1, seed=0).double(), where)
    around = store.around("nearest", 14)
    rows = torch.arange(60)
    found = around.sums_without(where, rows, 0)
    own = store._once(("order", 0), lambda: None).argsort()
    assert not (found._positions == own[:, None]).any()
    assert found.total.tolist() == [13] * 60


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "box"])
def test_random_localization_weighs_the_point_itself_like_the_others(kernel: str) -> None:
    scores, where, x = normal(80, 1, seed=1).double(), normal(80, 2, seed=2), normal(30, 2, seed=3)
    store = LocalStore()
    store.replace(scores, where)
    found = store.threshold(0.2, x, kernel, 1.5, "random", np.random.default_rng(5))
    around = store.around(kernel, 1.5)
    centre = x + 1.5 * around._draw(np.random.default_rng(5), 30, 2)
    for row in range(30):
        near = (where - centre[row]).square().sum(dim=1)
        own = (x[row] - centre[row]).square().sum()
        weights = localize.log_kernel(kernel, torch.cat([near, own[None]]) / 1.5**2).exp()
        order = scores[:, 0].argsort()
        reached = weights[:-1][order].cumsum(0) >= 0.8 * weights.sum()
        expected = float(scores[order][reached][0]) if reached.any() else math.inf
        assert float(found[row]) == expected


def test_only_so_many_rows_choose_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffcp.localized._CHOOSING_ROWS", 25)
    predictor = ffcp.LCP(small_mlp(), at_input()).calibrate(X, Y)
    assert predictor.bandwidth_choice.rows == 25
    assert len(predictor.calibration) == 275


@pytest.mark.parametrize("guarantee", ["none", "level"])
def test_a_tree_finds_the_same_neighbours(monkeypatch: pytest.MonkeyPatch, guarantee: str) -> None:
    pytest.importorskip("sklearn")
    store, x = LocalStore(), normal(40, 3, seed=2)
    store.replace(normal(1500, 1, seed=0), normal(1500, 3, seed=1))
    by_tree = store.threshold(0.1, x, "nearest", 40, guarantee)
    monkeypatch.setattr(localize, "_TREE_DIMENSIONS", 0)
    store._known = {}
    assert torch.equal(store.threshold(0.1, x, "nearest", 40, guarantee), by_tree)


def test_equal_distances_at_the_edge_still_give_the_asked_number() -> None:
    where = torch.zeros(30, 12)  # all in one place
    found = localize._compare_all(where)(torch.zeros(4, 12), 7)
    assert found.shape == (4, 7)
    assert len(found[0].unique()) == 7


def test_only_the_last_bandwidth_is_held_ready() -> None:
    store = LocalStore()
    store.replace(normal(200, 1, seed=0), normal(200, 2, seed=1))
    for bandwidth in (1.0, 2.0, 3.0):
        store.threshold(0.1, normal(5, 2, seed=2), "gaussian", bandwidth, "level")
        assert sum(key[0] == "around" for key in store._known) == 1
        assert sum(key[0] == "level" for key in store._known) == 1
