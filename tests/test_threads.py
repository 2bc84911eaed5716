"""One predictor in many threads, beside others that run, train or calibrate."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ffcp
from ffcp.segmentation import PixelSets
from tests.conftest import normal, small_mlp

THREADS, CALLS = 8, 12
X, Y, LABELS = normal(200, 4, seed=0), normal(200, seed=1), torch.arange(200) % 3
IMAGES, MAPS = normal(12, 2, 6, 6, seed=2), torch.arange(12 * 36).reshape(12, 6, 6) % 3


def maps() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))


class Case(NamedTuple):
    """A predictor on trial, what it is asked, and what its model takes."""

    predictor: Any
    ask: Callable[[], Tensor]
    x: Tensor
    y: Tensor

    def calibrated(self, scale: float = 1.0, **given: Any) -> Case:
        self.predictor.calibrate(self.x, scale * self.y if scale != 1 else self.y, **given)
        return self


def bands(predictor: Any, y: Tensor = Y, **given: Any) -> Case:
    def ask() -> Tensor:
        return predictor.predict_interval(X[:20], 0.2, first_row=0, **given).upper

    return Case(predictor, ask, X, y)


def sets(predictor: Any) -> Case:
    return Case(predictor, lambda: predictor.predict_set(X[:20], 0.2, first_row=0).mask, X, LABELS)


def probabilities(predictor: ffcp.VennAbers) -> Case:
    return Case(predictor, lambda: predictor.predict_proba(X[:20]), X, LABELS)


def pixels(predictor: PixelSets) -> Case:
    return Case(predictor, lambda: predictor.predict_set(IMAGES[:4], 0.3).mask, IMAGES, MAPS)


def lined() -> nn.Module:
    """A network of several outputs whose windows do not overlap."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.Tanh(), nn.Conv1d(2, 1, 1), nn.Flatten()
    )


def ratio(x: Tensor) -> Tensor:
    return (0.3 * x[:, 0]).exp()


near, weighted = (
    ffcp.kernels.Localizer("gaussian", on="input", bandwidth=2.0),
    ffcp.calibrations.Weighted(ratio),
)
GROUPS = ["a", "b"] * 100
CASES: dict[str, Callable[[], Case]] = {
    "CP": lambda: bands(ffcp.CP(small_mlp())).calibrated(),
    "compressed": lambda: bands(ffcp.CP(small_mlp())).calibrated(rank_error=0.05),
    "FFCP": lambda: bands(ffcp.FFCP(small_mlp(), "0")).calibrated(),
    "FFCP exact": lambda: bands(ffcp.FFCP(lined(), "1", method="exact"), X).calibrated(),
    "FFCP coloured": lambda: bands(ffcp.FFCP(lined(), "1", method="coloured"), X).calibrated(),
    "FFCP sketched": lambda: bands(
        ffcp.FFCP(small_mlp(), "0", method=ffcp.scales.Sketch(4))
    ).calibrated(),
    "FFCP smoothed": lambda: bands(
        ffcp.FFCP(small_mlp(), "0", method=ffcp.scales.Smooth(0.1, 2))
    ).calibrated(),
    "FFLCP": lambda: bands(
        ffcp.FFLCP(small_mlp(), "0", near, guarantee="random", seed=1)
    ).calibrated(),
    "FCP": lambda: bands(ffcp.FCP(small_mlp(), "0", steps=5)).calibrated(),
    "RAPS": lambda: sets(ffcp.RAPS(small_mlp(outputs=3), seed=1)).calibrated(),
    "FFRAPS": lambda: sets(
        ffcp.FFRAPS(small_mlp(outputs=3), gradient="feature", feature="0", seed=1)
    ).calibrated(),
    "PixelSets": lambda: pixels(PixelSets(maps(), "0", method="coloured")).calibrated(),
    "groups": lambda: bands(ffcp.FFCP(small_mlp(), "0"), groups=GROUPS[:20]).calibrated(
        groups=GROUPS
    ),
    "Auto": lambda: bands(ffcp.Auto(small_mlp(), seed=0)).calibrated(),
    "Learned": lambda: bands(ffcp.Learned(small_mlp(), seed=0)).calibrated(),
    "Weighted": lambda: bands(ffcp.CP(small_mlp(), calibration=weighted)).calibrated(),
    "ellipsoid": lambda: bands(ffcp.FFCP(lined(), "1", joint="ellipsoid"), X).calibrated(),
    "Conditional": lambda: bands(
        ffcp.CP(small_mlp(), calibration=ffcp.calibrations.Conditional("0"))
    ).calibrated(),
    "VennAbers": lambda: probabilities(ffcp.VennAbers(small_mlp(outputs=3))).calibrated(),
}


def together(*jobs: Callable[[], Any]) -> list[BaseException]:
    """Run jobs at the same time; give what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> None:
        try:
            torch.set_num_threads(1)  # torch counts them for each thread, and sums go by them
            start.wait()
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def check_threads(name: str, calls: int) -> None:
    case = CASES[name]()
    model = case.predictor.model.eval()
    expected, output, wrong = case.ask(), model(case.x).detach(), []

    def work() -> None:
        for _ in range(calls):
            if not torch.equal(case.ask(), expected):
                wrong.append(name)

    def run() -> None:
        for _ in range(2 * calls):
            out = model(case.x)
            assert out.requires_grad
            assert torch.equal(out, output)

    assert together(*[work] * THREADS, run) == []
    assert wrong == []


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", CASES)
def test_many_threads_get_what_one_gets(name: str) -> None:
    check_threads(name, CALLS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", CASES)
def test_many_threads_get_what_one_gets_for_long(name: str) -> None:
    check_threads(name, 500)


def test_the_model_can_be_run_meanwhile() -> None:
    model = small_mlp().eval()
    predictor = ffcp.FFCP(model, "0").calibrate(X, Y)
    expected = model(X).detach()

    def ask() -> None:
        for _ in range(60):
            predictor.predict_interval(X[:20])

    def run() -> None:
        for _ in range(200):
            out = model(X)
            assert torch.equal(out, expected)
            assert out.requires_grad

    assert together(ask, ask, run) == []


def losses(case: Case, steps: int = 60) -> list[float]:
    torch.manual_seed(5)
    model = case.predictor.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(steps):
        loss = (model(case.x).flatten(1)[:, 0] - Y[: len(case.x)]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_random_state_that_all_threads_share_is_never_set(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]()
    given = {"groups": GROUPS} if name == "groups" else {}

    def refused(*given: Any, **named: Any) -> None:
        raise AssertionError("the random state of all threads was touched")

    for place, function in (
        (torch.random, "fork_rng"),
        (torch.random, "set_rng_state"),
        (torch, "set_rng_state"),
        (torch, "manual_seed"),
    ):
        monkeypatch.setattr(place, function, refused)
    case.ask()
    case.calibrated(**given)


OFTEN = ["FFCP", *(pytest.param(name, marks=pytest.mark.heavy) for name in CASES if name != "FFCP")]


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", OFTEN)
def test_training_meanwhile_is_not_disturbed_and_no_band_is_given(name: str) -> None:
    expected = losses(CASES[name]())  # dropout draws random numbers: they must not be rewound
    case = CASES[name]()
    first = case.ask()
    trained: list[float] = []
    kinds: set[str] = set()

    def ask() -> None:
        for _ in range(30):
            try:
                assert torch.equal(case.ask(), first)
            except RuntimeError as error:
                kinds.add(str(error)[:60])

    assert together(lambda: trained.extend(losses(case)), ask) == []
    assert trained == expected
    ask()  # when it is trained, at the latest
    assert kinds == {"the model's weights or hooks have changed since the calibration, "[:60]}


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("name", OFTEN)
def test_every_band_is_of_one_calibration_while_another_takes_its_place(name: str) -> None:
    case = CASES[name]()
    given = {"groups": {"groups": GROUPS}, "compressed": {"rank_error": 0.05}}.get(name, {})
    is_band = case.y.is_floating_point()
    half = case._replace(x=case.x[::2], y=case.y[::2])

    def other() -> Case:
        return case.calibrated(3.0, **given) if is_band else half.calibrated()

    either = [case.ask(), other().ask()]

    def calibrate() -> None:
        for number in range(6):
            if number % 2:
                other()
            else:
                case.calibrated(**given)

    def ask() -> None:
        for _ in range(20):
            found = case.ask()
            assert any(torch.equal(found, one) for one in either)

    assert together(calibrate, ask, ask) == []


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
def test_the_user_model_is_left_alone() -> None:
    model = small_mlp()  # in train mode, as training left it
    hooks = [len(module._forward_hooks) for module in model.modules()]
    before = torch.random.get_rng_state()
    ffcp.FFCP(model).calibrate(X, X[:, 0].exp() * Y).predict_interval(X)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [len(module._forward_hooks) for module in model.modules()] == hooks


def test_a_forward_that_reaches_around_its_copy_is_used_as_it_is() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_mlp()
            inner = self.inner
            self.run = lambda x: inner(x)  # a copy of this module runs the original all the same

        def forward(self, x: Tensor) -> Tensor:
            return self.run(x)

    model = Around()  # in train mode: dropout would be on
    predictor = ffcp.CP(model).calibrate(X, Y)
    expected = model.eval()(X[:20]).detach()
    model.train()
    torch.testing.assert_close(predictor.predict_interval(X[:20]).prediction, expected[:, 0])
    assert model.inner.training


def test_points_that_threads_add_at_once_are_all_kept() -> None:
    parts = [normal(20, 4, seed=10 + i) for i in range(THREADS)]
    updated, merged = (ffcp.CP(small_mlp()).calibrate(X[:10], Y[:10]) for _ in range(2))

    def update(x: Tensor) -> Callable[[], Any]:
        return lambda: updated.calibrate(x, x[:, 0], update=True)

    def merge(x: Tensor) -> Callable[[], Any]:
        other = ffcp.CP(small_mlp()).calibrate(x, x[:, 0])
        return lambda: merged.merge(other)

    assert together(*map(update, parts), *map(merge, parts)) == []
    one_by_one = ffcp.CP(small_mlp()).calibrate(X[:10], Y[:10])
    for x in parts:
        one_by_one.calibrate(x, x[:, 0], update=True)
    for predictor in (updated, merged):
        assert torch.equal(predictor.calibration.scores, one_by_one.calibration.scores)


def meanwhile(predictor: Any, change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make something change a predictor when half of its state has been read."""
    kind, half, done = type(predictor), type(predictor).get_extra_state, []

    def read(self: Any) -> Tensor:
        state: Tensor = half(self)
        if not done:
            done.append(True)
            assert together(change) == []
        return state

    monkeypatch.setattr(kind, "get_extra_state", read)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "calibrate": lambda p, make: p.calibrate(X[:150], Y[:150]),
    "update": lambda p, make: p.calibrate(X[150:], Y[150:], update=True),
    "merge": lambda p, make: p.merge(make().calibrate(X[150:], Y[150:])),
    "compress": lambda p, make: p.compress(0.05),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["CP", "FFCP"])
def test_what_is_saved_is_one_calibration(
    name: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_mlp()

    def make() -> Any:
        return ffcp.CP(model) if name == "CP" else ffcp.FFCP(model, "0")

    predictor = make().calibrate(X[:100], Y[:100])
    expected = predictor.predict_interval(X[:5])
    meanwhile(predictor, lambda: CHANGES[change](predictor, make), monkeypatch)
    predictor.save(tmp_path / "saved")
    assert len(predictor.calibration) != 100 or hasattr(predictor.calibration, "rank_error")
    found = ffcp.load(tmp_path / "saved", model).predict_interval(X[:5])
    assert torch.equal(found.upper, expected.upper)


def test_a_state_dict_is_of_one_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_mlp()
    predictor = ffcp.CP(model).calibrate(X[:100], Y[:100])
    meanwhile(predictor, lambda: predictor.calibrate(X, Y), monkeypatch)
    state = nn.ModuleDict({"part": predictor}).state_dict()
    other = nn.ModuleDict({"part": ffcp.CP(small_mlp())})
    other.load_state_dict(state)
    assert len(other["part"].calibration) == 100


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_saving_beside_threads_that_change_a_calibration(change: str, tmp_path: Path) -> None:
    model = small_mlp()
    predictor = ffcp.CP(model).calibrate(X[:100], Y[:100])

    def work() -> None:
        for _ in range(40):
            CHANGES[change](predictor, lambda: ffcp.CP(model))
            if change == "compress":
                predictor.calibrate(X[:150], Y[:150])

    def save() -> None:
        for _ in range(40):
            predictor.save(tmp_path / "saved")
            ffcp.load(tmp_path / "saved", model)
            copied = copy.deepcopy(predictor)
            assert copied.predict_interval(X[:2]).upper.isfinite().all()

    assert together(work, save) == []


class Uncopied(nn.Module):
    """Cannot be copied, so that calls take turns; a pass lasts until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.goes_on, self.is_on = small_mlp(), threading.Event(), threading.Event()
        self.goes_on.set()

    def forward(self, x: Tensor) -> Tensor:
        self.is_on.set()
        self.goes_on.wait()
        found: Tensor = self.layer(x)
        return found

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")


def ends_well(child: int, seconds: float = 20.0) -> bool:
    """Wait for a process; end it if it hangs."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork beside threads
def test_a_process_forked_while_a_thread_predicts_can_predict() -> None:
    model = Uncopied()
    predictor = ffcp.CP(model).calibrate(X, Y)
    expected = predictor.predict_interval(X[:5]).upper
    for _ in range(2):
        model.goes_on.clear()
        model.is_on.clear()
        asking = threading.Thread(target=lambda: predictor.predict_interval(X[:5]))
        asking.start()
        model.is_on.wait()
        later = threading.Timer(0.1, model.goes_on.set)  # the pass ends while others wait for it
        later.start()
        child = os.fork()
        if not child:
            model.goes_on.set()
            same = torch.equal(predictor.predict_interval(X[:5]).upper, expected)
            predictor.calibrate(X, Y)
            os._exit(0 if same and model.training else 1)
        later.join()
        asking.join()
        assert ends_well(child, 5.0)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_while_a_thread_calibrates_can_calibrate() -> None:
    predictor, began, goes_on = ffcp.CP(small_mlp()), threading.Event(), threading.Event()

    def batches() -> Any:
        began.set()
        goes_on.wait()
        yield X, Y

    calibrating = threading.Thread(target=lambda: predictor.calibrate(batches()))
    calibrating.start()
    began.wait()
    child = os.fork()
    if not child:
        predictor.calibrate(X[:50], Y[:50])
        os._exit(0 if len(predictor.calibration) == 50 else 1)
    goes_on.set()
    calibrating.join()
    assert ends_well(child, 5.0)
