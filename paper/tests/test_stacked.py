"""Stacked training gives the networks that training one by one gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from ffcp import pinball_loss
from ffcp_paper.networks.regression import mlp
from ffcp_paper.training import minibatches, stacked
from ffcp_paper.training.regression import train, train_as_published, train_quantiles
from ffcp_paper.training.stacked import pair, search_epochs_stacked, train_stacked
from helpers import normal

pytestmark = pytest.mark.heavy

ROWS, SEEDS = 150, (3, 4, 5)  # two full batches and a part of one
XS = [normal(ROWS, 9, seed=seed) for seed in SEEDS]
YS = [x[:, 0] + x[:, 1].square() + normal(ROWS, seed=9) for x in XS]
LEVELS = (0.1, 0.9)


def build(outputs: int = 1, dropout: float = 0.1) -> list[nn.Sequential]:
    models = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        models.append(mlp(9, outputs=outputs, dropout=dropout))
    return models


def squared(guess: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(guess, y)


def pinball(guess: Tensor, y: Tensor) -> Tensor:
    return pinball_loss(guess, y, LEVELS)


def one_by_one(
    models: list[nn.Sequential],
    epochs: list[int],
    loss: Callable[[Tensor, Tensor], Tensor] = squared,
) -> list[nn.Module]:
    return [
        train(model, x, y[:, None], epochs=count, seed=seed, loss=loss)
        for model, x, y, count, seed in zip(models, XS, YS, epochs, SEEDS, strict=True)
    ]


def assert_same(ours: list[nn.Module], theirs: list[nn.Module], atol: float = 1e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert not one.training
        for left, right in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(left, right, atol=atol, rtol=0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_same_networks_as_one_by_one(dropout: float, outputs: int) -> None:
    levels, loss = (None, squared) if outputs == 1 else (LEVELS, pinball)
    ours = train_stacked(build(outputs, dropout), XS, YS, epochs=5, seeds=SEEDS, levels=levels)
    assert_same(ours, one_by_one(build(outputs, dropout), [5] * 3, loss))


@pytest.mark.parametrize("epochs", [[1, 4, 2], [3, 0, 3], [0, 0, 0]])
@pytest.mark.usefixtures("two_threads")
def test_a_network_that_is_done_leaves_the_others_alone(epochs: list[int]) -> None:
    ours = train_stacked(build(), XS, YS, epochs=epochs, seeds=SEEDS)
    assert_same(ours, one_by_one(build(), epochs))


def test_several_blocks_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minibatches, "_BLOCK", 2)
    ours = train_stacked(build(), XS, YS, epochs=[2, 3, 1], seeds=SEEDS)
    assert_same(ours, one_by_one(build(), [2, 3, 1]))


def test_dropout_drawn_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minibatches, "_draws_concatenate", lambda: False)
    ours = train_stacked(build(), XS, YS, epochs=2, seeds=SEEDS)
    assert_same(ours, one_by_one(build(), [2] * 3))


def test_other_settings_are_passed_on() -> None:
    settings = {"learning_rate": 0.01, "weight_decay": 0.1, "batch_size": 40}
    ours = train_stacked(build(), XS, YS, epochs=2, seeds=SEEDS, **settings)
    theirs = [
        train(model, x, y[:, None], epochs=2, seed=seed, **settings)
        for model, x, y, seed in zip(build(), XS, YS, SEEDS, strict=True)
    ]
    assert_same(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("patience", [2, 100])
def test_the_protocol_gives_each_network_its_own_epochs(patience: int) -> None:
    settings = {"epochs": 25, "patience": patience}
    calls: list[int] = []
    told: dict[int, int] = {}
    common = {"seeds": SEEDS, "progress": lambda: calls.append(1)}
    searching, fresh = zip(*(pair(9, seed) for seed in SEEDS), strict=True)
    best = search_epochs_stacked(
        searching, XS, YS, done=lambda number, epochs: told.update({number: epochs}), **common,
        **settings,
    )  # fmt: skip
    assert told == dict(enumerate(best))
    ours = train_stacked(fresh, XS, YS, epochs=best, **common)
    expected: list[int] = []
    theirs = [
        train_as_published(x, y, seed=seed, progress=lambda: expected.append(1), **settings)
        for x, y, seed in zip(XS, YS, SEEDS, strict=True)
    ]
    assert len(calls) == len(expected)
    assert_same(ours, theirs, atol=1e-5)


def test_quantile_networks() -> None:
    models = [pair(9, seed, outputs=2)[0] for seed in SEEDS]
    ours = train_stacked(models, XS, YS, epochs=3, seeds=SEEDS, levels=LEVELS)
    theirs = [
        train_quantiles(x, y, LEVELS, epochs=3, seed=seed)
        for x, y, seed in zip(XS, YS, SEEDS, strict=True)
    ]
    assert_same(ours, theirs)


@pytest.mark.parametrize("threads", ["one_thread", "two_threads"])
def test_networks_of_one_seed_have_levels_and_epochs_of_their_own(
    threads: str, request: pytest.FixtureRequest
) -> None:
    if threads == "two_threads":
        request.getfixturevalue(threads)
    wanted = [(0, LEVELS, 2), (1, LEVELS, 3), (0, (0.4, 0.6), 3), (0, (0.2, 0.7), 1)]
    numbers, levels, epochs = (list(part) for part in zip(*wanted, strict=True))
    seeds = [SEEDS[number] for number in numbers]
    done: list[int] = []
    ours = train_stacked(
        [pair(9, seed, outputs=2)[0] for seed in seeds],
        [XS[number] for number in numbers],
        [YS[number] for number in numbers],
        epochs=epochs,
        seeds=seeds,
        levels=levels,
        done=lambda number, model: done.append(number),
    )
    theirs = [
        train_quantiles(XS[number], YS[number], own, epochs=count, seed=SEEDS[number])
        for number, own, count in wanted
    ]
    assert_same(ours, theirs)
    assert done == [3, 0, 1, 2]  # in the order in which they end


def test_the_search_looks_at_the_loss_that_is_trained() -> None:
    every = [(0.05, 0.1), (0.9, 0.95), (0.4, 0.6)]
    models = [pair(9, seed, outputs=2)[0] for seed in SEEDS]
    found = search_epochs_stacked(models, XS, YS, seeds=SEEDS, epochs=12, patience=100,
                                  levels=every)  # fmt: skip
    for x, y, seed, own, best in zip(XS, YS, SEEDS, every, found, strict=True):
        held, errors = len(x) // 20, []

        def note(model: nn.Module, x=x, y=y, own=own, held=held, errors=errors) -> bool:
            errors.append(float(pinball_loss(model(x[:held]), y[:held], own).detach()))
            return False

        train(pair(9, seed, outputs=2)[0], x[held:], y[held:], epochs=12, seed=seed, stop=note,
              loss=lambda guess, y, own=own: pinball_loss(guess, y, own))  # fmt: skip
        assert best == errors.index(min(errors)) + 1


def test_the_slope_of_the_pinball_loss_is_that_of_autograd_at_ties_too() -> None:
    guess = torch.tensor([[[0.0, 1.0], [2.0, 2.0], [-1.0, 0.5]]]).requires_grad_()
    y = torch.tensor([[[0.0], [2.0], [0.5]]])
    pinball(guess, y).backward()
    out = torch.empty_like(guess)
    stacked._pinball_slope(guess.detach(), y, out, torch.tensor([[LEVELS]]))
    torch.testing.assert_close(out, guess.grad)


def test_targets_may_be_columns() -> None:
    flat = train_stacked(build(), XS, YS, epochs=1, seeds=SEEDS)
    columns = train_stacked(build(), XS, [y[:, None] for y in YS], epochs=1, seeds=SEEDS)
    assert_same(flat, columns, atol=0)


def test_stop_ends_one_network() -> None:
    seen: list[int] = []

    def stop(number: int, model: nn.Module) -> bool:
        assert not model.training
        seen.append(number)
        return number == 1

    ours = train_stacked(build(), XS, YS, epochs=3, seeds=SEEDS, stop=stop)
    assert seen == [0, 1, 2, 0, 2, 0, 2]
    assert_same(ours, one_by_one(build(), [3, 1, 3]))


def test_the_callers_random_state_is_left_alone() -> None:
    models = build()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train_stacked(models, XS, YS, epochs=1, seeds=SEEDS)
    search_epochs_stacked(models, XS, YS, seeds=SEEDS, epochs=1)
    pair(9, 0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": [mlp(9), mlp(9), mlp(9, width=32)]}, "shape"),
        ({"models": [mlp(9), mlp(9), nn.Linear(9, 1)]}, "Linear"),
        ({"models": [mlp(9, dropout=1.0)] * 3}, "rate"),
        ({"models": [mlp(9, outputs=2)] * 3}, r"\b2\b"),
        ({"models": []}, "xs"),
        ({"xs": [*XS[:2], XS[2][:-1]]}, r"\b149\b"),
        ({"xs": [x[:, :4] for x in XS]}, r"xs\[0\]"),
        ({"ys": [*YS[:2], YS[2][:-1]]}, r"ys\[2\]"),
        ({"seeds": (1, 2)}, "seeds"),
        ({"epochs": [1]}, "epochs"),
        ({"levels": (0.1, 0.9)}, "levels"),
        ({"levels": (1.0,)}, "level"),
        ({"levels": [(0.5,), (0.5,)]}, "levels"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_stacked_is_refused(changes, message: str) -> None:
    given = {"models": build(), "xs": XS, "ys": YS, "epochs": 1, "seeds": SEEDS, **changes}
    with pytest.raises(ValueError, match=message):
        train_stacked(given.pop("models"), given.pop("xs"), given.pop("ys"), **given)
