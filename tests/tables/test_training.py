"""Networks for tables: what is learned beside the prediction, and from which rows."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("pandas")
pytest.importorskip("tabm")

import pandas as pd
import torch
from torch import Tensor

from ffcp.regression.learned.nested import KNOTS
from ffcp.tables import fitting, splitting
from ffcp.tables.network import QuantileHead, TableNetwork
from ffcp.tables.training import loss_on, train
from tests.tables.material import houses


def material(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=draw)
    return x, torch.where(x[:, 0] > 0, 1.0, 0.1) * torch.randn(rows, generator=draw)


def test_quantiles_are_learned_where_the_mean_says_nothing() -> None:
    torch.manual_seed(0)
    x, y = material(1500)
    network = TableNetwork.for_rows(x[:1200], 2, 1, y[:1200])
    start = network.quantiles(network.means(x)[1])
    expected = torch.quantile(y[:1200].double(), KNOTS).float().expand(1500, -1)
    torch.testing.assert_close(start, expected, rtol=0, atol=0.03)
    train(network, x[:1200], y[:1200], x[1200:], y[1200:], seconds=60, seed=0, most_epochs=15)
    quantiles = network.quantiles(network.means(x)[1])
    assert bool((quantiles.diff(dim=1) > 0).all())
    width = quantiles[:, -2] - quantiles[:, 1]
    assert width[x[:, 0] > 0.3].median() > 4 * width[x[:, 0] < -0.3].median()


def test_the_weights_that_are_left_are_those_whose_loss_is_told() -> None:
    torch.manual_seed(0)
    x, y = material(300)
    network = TableNetwork.for_rows(x, 2, 1, y)
    trained = train(network, x, y, x[:50], y[:50], seconds=60, seed=0, most_epochs=5)
    assert loss_on(network, x[:50], y[:50]) == pytest.approx(trained.loss, rel=1e-5)


def test_the_mean_over_steps_is_what_training_leaves() -> None:
    torch.manual_seed(0)
    x, y = material(300)
    network = TableNetwork.for_rows(x, 2, 1, y)
    steps: list[Tensor] = []
    step = torch.optim.AdamW.step

    def record(self: torch.optim.AdamW, *given: Any) -> None:
        step(self, *given)
        steps.append(network.output.bias.detach().clone())

    with mock.patch.object(torch.optim.AdamW, "step", record):
        train(network, x, y, x[:50], y[:50], seconds=60, seed=0, most_epochs=1)
    mean = steps[0]
    for count, weights in enumerate(steps[1:], 2):  # recent ones above all
        mean = mean.lerp(weights, 1 - count / (count + 9))
    torch.testing.assert_close(network.output.bias.detach(), mean)


def test_long_tails_are_drawn_in_and_short_ones_are_left() -> None:
    y = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    normal, heavy = QuantileHead.of(y), QuantileHead.of((3 * y).exp())
    drawn = normal.transform(y)
    torch.testing.assert_close(drawn, (y - y.median()) / y.std(correction=0), rtol=0.01, atol=0.01)
    assert float(heavy.transform((3 * y).exp()).abs().max()) < 10
    assert float((3 * y).exp().max() / (3 * y).exp().std()) > 30


def test_rows_that_calibrate_or_test_change_nothing_of_the_network() -> None:
    frame, other = houses(450), houses(450)
    parts = splitting.divide(450, 0.1, 0, crossing=True)
    unseen = [*parts.calibrate, *parts.test]
    other.loc[unseen, "price"] *= 100
    other.loc[unseen, "size"] += 1000
    one, two = (_network(table) for table in (frame, other))
    assert "quantiles.bend" in one
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


def _network(frame: pd.DataFrame) -> dict[str, Tensor]:
    made: list[dict[str, Tensor]] = []

    class EnoughError(Exception):
        pass

    def short(network: TableNetwork, *args: Tensor, **options: Any) -> Any:
        options.update(most_epochs=2, seconds=1e9)
        train(network, *args, **options)
        made.append(network.state_dict())
        raise EnoughError

    with mock.patch.object(fitting, "train", short), pytest.raises(EnoughError):
        fitting.fit(frame, "price", minutes=0.5, seed=0)
    return made[0]


def test_targets_that_are_one_number_have_quantiles() -> None:
    network = TableNetwork.for_rows(torch.randn(20, 2), 2, 1, torch.full((20,), 3.0))
    raw = network.members(torch.randn(5, 2))[1]
    assert bool(network.quantiles(raw).isfinite().all())


def test_far_targets_do_not_steer_what_quantiles_learn() -> None:
    torch.manual_seed(0)
    x, y = material(200)
    far = y.clone()
    far[0] = 1e4
    light, heavy = (TableNetwork.for_rows(x, 2, 1, target).train() for target in (y, far))
    for network, reaches in ((light, True), (heavy, False)):
        network.members(x)[0].sum().backward()
        grads = [weight.grad for weight in network.backbone.parameters()]
        assert any(grad is not None for grad in grads) == reaches


@pytest.mark.parametrize(("numbers", "embedding"), [(3, 12), (280, 5), (1000, 2)])
def test_many_columns_are_embedded_in_fewer_numbers_each(numbers: int, embedding: int) -> None:
    x = torch.randn(20, numbers)
    network = TableNetwork.for_rows(x, numbers, 1)
    again = TableNetwork.of_shape(network.shape).eval()
    again.load_state_dict(network.state_dict())
    assert network.shape.embedding == embedding
    assert torch.equal(again(x), network.eval()(x))
