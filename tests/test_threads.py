"""One predictor in many threads, beside others that run, train or calibrate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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


def bands(predictor: ffcp.Bands) -> Callable[[], Tensor]:
    predictor.calibrate(X, Y)
    return lambda: predictor.predict_interval(X[:20], 0.2, first_row=0).upper


def compressed(predictor: ffcp.Bands) -> Callable[[], Tensor]:
    bands(predictor)
    predictor.compress(0.05)
    return lambda: predictor.predict_interval(X[:20], 0.2).upper


def sets(predictor: ffcp.LabelSets) -> Callable[[], Tensor]:
    predictor.calibrate(X, LABELS)
    return lambda: predictor.predict_set(X[:20], 0.2, first_row=0).mask


def pixels(predictor: PixelSets) -> Callable[[], Tensor]:
    predictor.calibrate(IMAGES, MAPS)
    return lambda: predictor.predict_set(IMAGES[:4], 0.3).mask


near = ffcp.Localizer("gaussian", on="input", bandwidth=2.0)
CASES: dict[str, Callable[[], Callable[[], Tensor]]] = {
    "CP": lambda: bands(ffcp.CP(small_mlp())),
    "compressed": lambda: compressed(ffcp.CP(small_mlp())),
    "FFCP": lambda: bands(ffcp.FFCP(small_mlp(), "0")),
    "FFCP sketched": lambda: bands(ffcp.FFCP(small_mlp(), "0", method=ffcp.Sketch(4))),
    "FFCP smoothed": lambda: bands(ffcp.FFCP(small_mlp(), "0", method=ffcp.Smooth(0.1, 2))),
    "FFLCP": lambda: bands(ffcp.FFLCP(small_mlp(), "0", near, guarantee="random", seed=1)),
    "FCP": lambda: bands(ffcp.FCP(small_mlp(), "0", steps=5)),
    "RAPS": lambda: sets(ffcp.RAPS(small_mlp(outputs=3), seed=1)),
    "FFRAPS": lambda: sets(
        ffcp.FFRAPS(small_mlp(outputs=3), gradient="feature", feature="0", seed=1)
    ),
    "PixelSets": lambda: pixels(PixelSets(maps(), "0", method="coloured")),
}


def together(*jobs: Callable[[], Any]) -> list[BaseException]:
    """Run jobs at the same time; give what they raised."""
    raised: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> None:
        try:
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
    ask = CASES[name]()
    expected, wrong = ask(), []

    def work() -> None:
        for _ in range(calls):
            if not torch.equal(ask(), expected):
                wrong.append(name)

    assert together(*[work] * THREADS) == []
    assert wrong == []


@pytest.mark.long
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


def losses(model: nn.Module, steps: int = 60) -> list[float]:
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for _ in range(steps):
        loss = (model(X)[:, 0] - Y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_training_meanwhile_is_not_disturbed_and_no_band_is_given() -> None:
    expected = losses(small_mlp())  # dropout draws random numbers: they must not be rewound
    model = small_mlp()
    predictor = ffcp.FFCP(model, "0").calibrate(X, Y)
    first = predictor.predict_interval(X[:20]).upper
    trained: list[float] = []
    kinds: set[str] = set()

    def ask() -> None:
        for _ in range(60):
            try:
                assert torch.equal(predictor.predict_interval(X[:20]).upper, first)
            except RuntimeError as error:
                kinds.add(str(error)[:60])

    assert together(lambda: trained.extend(losses(model)), ask) == []
    assert trained == expected
    assert kinds == {"the model's weights are no longer those of the calibration, "[:60]}


def test_every_band_is_of_one_calibration_while_another_takes_its_place() -> None:
    predictor = ffcp.FFCP(small_mlp(), "0")
    either = []
    for scale in (1.0, 3.0):
        predictor.calibrate(X, scale * Y)
        either.append(predictor.predict_interval(X[:20]).upper)

    def calibrate() -> None:
        for number in range(30):
            predictor.calibrate(X, (1.0, 3.0)[number % 2] * Y)

    def ask() -> None:
        for _ in range(100):
            upper = predictor.predict_interval(X[:20]).upper
            assert any(torch.equal(upper, one) for one in either)

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
    torch.testing.assert_close(predictor.predict_interval(X[:20]).prediction, expected)
    assert model.inner.training
