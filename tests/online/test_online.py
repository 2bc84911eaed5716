"""Streams: what each method promises at its constant, late truths, and being stopped."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ffcp
from ffcp.online.controllers import Aci, DtAci, Pid, Window, pinball
from tests.conftest import normal, small_mlp

ALPHAS = [Fraction(1, 20), Fraction(1, 10), Fraction(1, 2), Fraction(9, 10)]

# What an adversary does with a row: its score, given the threshold, and when its truth comes.
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["above", "below", "far", "huge", "random"]),
        st.integers(0, 6),  # rows until the truth comes
        st.booleans(),  # whether it ever comes
    ),
    min_size=1,
    max_size=300,
)


def score_of(move: str, threshold: float, row: int) -> float:
    base = threshold if math.isfinite(threshold) else 1.0
    return {
        "above": np.nextafter(base, math.inf),
        "below": base,
        "far": base + 1.0,
        "huge": 1e12 * (row + 1),
        "random": math.sin(row * 12.9898) * 43758.5453 % 1.0,
    }[move]


def record_remotely(row: int, level: Fraction) -> float:
    """Give the threshold of a calibration that has one for every input: at some it is infinite."""
    if level >= 1 or level <= 0:
        return -math.inf if level >= 1 else math.inf
    return math.inf if row % 7 == 3 else 10 * math.sin(row) / float(level)


def past() -> Window:
    return Window(20, 1.0, [0.1 * i for i in range(20)])


def played(
    control: Any, moves: list[tuple[str, int, bool]], repeat: int, stands: bool = False
) -> int:
    """Play a stream against an adversary; return the most rows that waited at a prediction."""
    waiting: list[tuple[int, float, Any]] = []
    delay = 0
    for row in range(repeat * len(moves)):
        move, late, comes = moves[row % len(moves)]
        delay = max(delay, len(waiting))
        applied = control.next_threshold()
        if stands:
            applied = control.applied([record_remotely(row, level) for level in control.levels()])
        if comes:
            waiting.append((row + late, score_of(move, applied.threshold, row), applied))
        due = [one for one in waiting if one[0] <= row]
        waiting = [one for one in waiting if one[0] > row]
        for _, score, then in sorted(due, key=lambda one: -one[1]):  # not as they were predicted
            control.learn(score, then)
        if control.observed:
            share = control.misses / control.observed
            assert abs(share - control.alpha) <= control.bound(delay)
    return delay


@given(
    MOVES,
    st.sampled_from(ALPHAS),
    st.sampled_from([Fraction(1, 200), Fraction(1, 10), 2]),
    st.booleans(),
)
def test_aci_covers_any_sequence_at_its_constant(
    moves: list[tuple[str, int, bool]], alpha: Fraction, gamma: Any, stands: bool
) -> None:
    played(Aci(alpha, past(), Fraction(gamma)), moves, 3, stands)


@pytest.mark.long
@given(MOVES, st.sampled_from(ALPHAS), st.sampled_from([0.05, 0.5]), st.booleans())
def test_pid_covers_any_sequence_at_its_constant(
    moves: list[tuple[str, int, bool]], alpha: Fraction, saturation: float, stands: bool
) -> None:
    played(Pid(alpha, past(), saturation), moves, 3, stands)


def test_the_constants_are_not_idle() -> None:
    control = Aci(Fraction(1, 10), Window(20, 1.0, [1.0] * 20), Fraction(1, 100))
    for _ in range(900):  # never missed, until the level is 1
        control.learn(0.0, control.next_threshold())
    assert control.misses == 0
    assert 0.98 * control.bound(0) < control.alpha <= control.bound(0)
    stubborn = Pid(Fraction(1, 10), Window(20, 1.0, [1.0] * 20), 0.5)
    for _ in range(3000):
        applied = stubborn.next_threshold()
        stubborn.learn(math.inf if applied.threshold < math.inf else 0.0, applied)
    assert stubborn.excess > 0.9 * stubborn.limit


@pytest.mark.heavy
@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(["steady", "jumps", "drift"]), st.booleans())
def test_dtaci_is_as_good_as_its_best_step_size(seed: int, kind: str, stands: bool) -> None:
    horizon, random = 200, np.random.default_rng(seed)
    past = Window(100, 1.0, random.random(100))
    control = DtAci(Fraction(1, 10), past, horizon)
    alpha, k = 0.1, len(control.gammas)
    own, squares, experts = 0.0, 0.0, np.zeros(k)
    for row in range(horizon):
        applied = control.next_threshold()
        moved = {"steady": 0.0, "jumps": float(row > 100), "drift": row / 100}[kind]
        score = float(random.random() + moved)
        beta = past.largest_level(score)
        if stands:  # thresholds in proportion to what differs from row to row
            size = 0.5 + float(random.random())
            reached = [size * past.quantile(level) for level in control.levels()]
            applied, exact = control.applied(reached), past.largest_level(score / size)
            score_at, beta = score, applied.beta(score)
            # Each step size misses as at the exact level, and beta lies next to it.
            assert [level > beta for level in applied.levels] == [
                score_at > threshold for threshold in reached[1:]
            ]
            assert not any(beta < level < exact for level in applied.levels)
        losses = np.array([pinball(beta, level, alpha) for level in applied.levels])
        weights = np.array(control.weights)
        own += pinball(beta, float(weights @ np.array(applied.levels)), alpha)
        squares += float(weights @ losses**2)
        experts += losses
        control.learn(score, applied)
    most = (math.log(k / control.sigma) + 2 * control.sigma * horizon) / control.eta
    assert own <= experts.min() + most + control.eta * squares


@given(
    st.lists(st.integers(0, 5), max_size=30), st.integers(1, 8), st.sampled_from([1.0, 0.5, 0.9])
)
def test_a_window_is_the_last_scores_with_their_weights(
    scores: list[int], size: int, forget: float
) -> None:
    window = Window(size, forget, map(float, scores))
    last = [float(score) for score in scores[-size:]]
    assert list(window.scores) == last
    weights = [math.floor(2**23 * forget**age) for age in range(len(last))][::-1]
    for alpha in (Fraction(1, 10), Fraction(1, 3), Fraction(2, 3)):
        reached, expected = 0, math.inf
        for score, weight in sorted(zip(last, weights, strict=True)):
            reached += weight
            if reached >= (1 - alpha) * (sum(weights) + 2**23):
                expected = score
                break
        assert window.quantile(alpha) == expected
        if expected < math.inf:
            assert window.largest_level(expected) >= float(alpha) - 1e-12
    assert window.quantile(Fraction(0)) == math.inf
    assert window.quantile(Fraction(1)) == -math.inf


def calibrated(outputs: int = 1) -> tuple[Any, Tensor, Tensor]:
    x, y = normal(400, 4, seed=1), normal(400, outputs, seed=2)
    return ffcp.FFCP(small_mlp(outputs=outputs), "0").calibrate(x[:200], y[:200]), x[200:], y[200:]


@pytest.mark.long
@pytest.mark.parametrize("method", ["aci", "dtaci", "pid", "plain"])
def test_misses_are_truths_outside_the_bands_that_were_given(method: str) -> None:
    predictor, x, y = calibrated()
    online = ffcp.Online(predictor, method, alpha=0.2)
    missed = 0
    for i in range(len(x)):
        band = online.predict_interval(x[i : i + 1])
        missed += int(((y[i : i + 1] < band.lower) | (y[i : i + 1] > band.upper)).sum())
        online.update(x[i : i + 1], y[i : i + 1])
    assert online.misses == [missed]
    assert online.observed == [len(x)]
    assert abs(missed / len(x) - 0.2) < 0.1


def test_levels_follow_a_break_where_cp_does_not() -> None:
    predictor, x, y = calibrated()
    y = torch.where(torch.arange(200)[:, None] < 50, y, 4 * y)
    inside = predictor.predict_interval(x, 0.1)
    plain = ((inside.lower <= y) & (y <= inside.upper))[50:].double().mean()
    online, hits = ffcp.Online(predictor, "aci", 0.1, gamma=0.05, window=100), []
    for i in range(200):
        band = online.predict_interval(x[i : i + 1])
        hits.append(bool((band.lower <= y[i]) & (y[i] <= band.upper)))
        online.update(x[i : i + 1], y[i : i + 1])
    assert plain < 0.6 < 0.8 < np.mean(hits[50:])


def test_truths_come_late_in_any_order_or_never() -> None:
    predictor, x, y = calibrated()
    online = ffcp.Online(predictor, "aci", waiting=60)
    online.predict_interval(x[:50])
    assert online.delay == 49
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    online.update(x[order], y[order])
    assert online.observed == [40]
    with pytest.raises(ValueError, match="row 0"):
        online.update(x[:1], y[:1])
    online.predict_interval(x[50:110])
    assert len(online._waiting) == 60  # the ten that never came are given up
    with pytest.raises(ValueError, match="row 0"):
        online.update(x[45:46], y[45:46])


def test_a_refused_update_changes_nothing() -> None:
    predictor, x, y = calibrated()
    online = ffcp.Online(predictor, "aci")
    online.predict_interval(x[:5])
    with pytest.raises(ValueError, match="row 5"):
        online.update(x[:6], y[:6])
    assert online.observed == [0]
    online.update(x[:5], y[:5])


def test_equal_inputs_are_answered_in_their_order() -> None:
    predictor, x, y = calibrated()
    online = ffcp.Online(predictor, "aci")
    same = x[:1].expand(3, -1)
    online.predict_interval(same)
    online.update(same, y[:3])
    assert online.observed == [3]
    assert not online._waiting


def test_a_batch_is_its_rows_whose_truths_come_late() -> None:
    predictor, x, y = calibrated()
    one, other = ffcp.Online(predictor, "aci"), ffcp.Online(predictor, "aci")
    whole = one.predict_interval(x[:20])
    rows = [other.predict_interval(x[i : i + 1]) for i in range(20)]
    assert torch.allclose(whole.upper, torch.cat([band.upper for band in rows]))
    one.update(x[:20], y[:20])
    for i in range(20):
        other.update(x[i : i + 1], y[i : i + 1])
    assert (one.observed, one.misses) == (other.observed, other.misses)
    assert one.delay == other.delay == 19


def test_every_horizon_has_a_level_of_its_own_and_truths_of_its_own() -> None:
    predictor, x, y = calibrated(outputs=3)
    y = y * torch.tensor([1.0, 1.0, 10.0])
    online = ffcp.Online(predictor, "aci", gamma=0.05)
    for i in range(100):
        online.predict_interval(x[i : i + 1])
        near = y[i : i + 1].clone()
        near[:, 2] = torch.nan
        online.update(x[i : i + 1], near)
    assert online.observed == [100, 100, 0]
    far = y[:60].clone()
    far[:, :2] = torch.nan
    online.update(x[:60], far)
    assert online.observed == [100, 100, 60]
    levels = [control.levels()[0] for control in online._controls[None]]
    assert levels[2] < min(levels[:2])


@pytest.mark.long
@pytest.mark.parametrize("method", ["aci", "dtaci", "pid", "plain"])
def test_a_stream_goes_on_where_it_was_saved(method: str, tmp_path: Path) -> None:
    predictor, x, y = calibrated()
    whole, path = ffcp.Online(predictor, method, forget=0.99), tmp_path / "stream.safetensors"
    cut = ffcp.Online(predictor, method, forget=0.99)
    for i in range(40):
        for online in (whole, cut):
            online.predict_interval(x[i : i + 1])
            if i >= 3:
                online.update(x[i - 3 : i - 2], y[i - 3 : i - 2])
        if i % 7 == 0:
            cut.save(path)
            cut = ffcp.Online(predictor, method, forget=0.99).load(path)
    assert whole.state() == cut.state()
    one, other = (online.predict_interval(x[50:60]) for online in (whole, cut))
    assert torch.equal(one.upper, other.upper)
    with pytest.raises(ffcp.CalibrationFileError, match="settings"):
        ffcp.Online(predictor, method, alpha=0.2).load(path)


@pytest.mark.heavy
def test_a_step_takes_no_more_room_or_work_as_time_goes_on(tmp_path: Path) -> None:
    predictor, x, y = calibrated()
    path = tmp_path / "stream.safetensors"
    online, sizes = ffcp.Online(predictor, "dtaci", window=50, waiting=30), []
    for i in range(0, 200, 2):
        online.predict_interval(x[i : i + 2])
        online.update(x[i : i + 1], y[i : i + 1])  # every second truth never comes
        online.save(path)
        sizes.append(path.stat().st_size)
    assert len(online.state()["controls"][0][1][0]["scores"]) == 50
    assert len(online._waiting) <= 30
    assert sizes[-1] < 1.1 * sizes[40]


def test_what_has_no_stream_is_refused() -> None:
    x, y, model = normal(100, 2, seed=1), normal(100, seed=2), nn.Linear(2, 1)
    local = ffcp.LCP(model, "nearest").calibrate(x, y)
    with pytest.raises(ValueError, match="plain"):
        ffcp.Online(local, "plain")
    with pytest.raises(ValueError, match="forget"):
        ffcp.Online(local, "aci", forget=0.9)
    sets = ffcp.LAC(nn.Linear(2, 3)).calibrate(x, torch.arange(100) % 3)
    with pytest.raises(TypeError, match="LAC"):
        ffcp.Online(sets)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="CP"):
        ffcp.Online(ffcp.CP(model))
    with pytest.raises(ValueError, match="magic"):
        ffcp.Online(ffcp.CP(model).calibrate(x, y), "magic")
    ready = ffcp.CP(model).calibrate(x, y)
    for name, value in (
        ("window", 2.5),
        ("gamma", "x"),
        ("saturation", 0),
        ("forget", True),
        ("waiting", 0),
    ):
        with pytest.raises(ValueError, match=name):
            ffcp.Online(ready, "aci", **{name: value})
