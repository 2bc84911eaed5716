"""Baselines implemented here: a prototype, and two published methods as we read them.

- ``pooled``: boosted quantiles of the residual, learned from training rows and most of the
  calibration rows together; calibrated by a factor on the learned width.
- ``laplace``: a last-layer Laplace approximation. The last layer of the network is a Bayesian
  linear regression on the last hidden values, its prior and noise set by the evidence (MacKay,
  1992; Daxberger et al., 2021); residuals are divided by the predictive standard deviation.
- ``epicscore``: EPICSCORE (Cabezas, Santos, Ramos and Izbicki, UAI 2025) with its default, Monte
  Carlo dropout: a mixture density network learns the distribution of the score |y - f(x)| from
  most of the calibration rows, its dropout masks stand for what it does not know, and what is
  calibrated is the place of a score in its predictive distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ffcp.conformal.rank import conformal_quantile
from ffcp_paper.data.datasets import Split

Array = NDArray[np.float64]
Predict = Callable[[Tensor], tuple[Any, Any]]


def numbers(values: Tensor) -> Array:
    """Return a column of numbers as a flat array."""
    return values.detach().double().reshape(-1).numpy()


def predicted(model: nn.Module, x: Tensor) -> Array:
    """Return the predictions of a network."""
    with torch.no_grad():
        return numbers(model(x))


def threshold(scores: Array, alpha: float) -> float:
    """Return the conformal quantile."""
    return float(conformal_quantile(torch.from_numpy(scores), alpha))


# -- the prototype ---------------------------------------------------------------------------------

_LEARNED, _WEIGHT = (
    0.6,
    0.5,
)  # the share of calibration rows that teaches; the weight of training rows


def boosted_quantile(
    columns: Array, target: Array, level: float, weights: Array | None = None
) -> Any:
    """Learn a quantile with LightGBM; returns a function of the columns."""
    import lightgbm

    settings = {
        "objective": "quantile", "alpha": level, "learning_rate": 0.05, "num_leaves": 15,
        "min_child_samples": max(10, min(50, len(target) // 40)), "subsample": 0.8,
        "subsample_freq": 1, "colsample_bytree": 0.8, "verbose": -1, "num_threads": 1, "seed": 0,
    }  # fmt: skip
    data = lightgbm.Dataset(columns, target, weight=weights)
    return lightgbm.train(settings, data, 150).predict


def pooled(
    model: nn.Module, parts: Split, alpha: float, columns: Callable[[Tensor], Array] | None = None
) -> Predict:
    """Return intervals between boosted quantiles of the residual, learned from pooled rows.

    ``columns`` computes the features; by default input and prediction.
    """

    def own(x: Tensor) -> Array:
        return np.column_stack([x.double().numpy(), predicted(model, x)])

    features = columns or own
    count = int(_LEARNED * len(parts.y_cal))
    fresh = numbers(parts.y_cal) - predicted(model, parts.x_cal)
    known = numbers(parts.y_train) - predicted(model, parts.x_train)
    # Training residuals are too small: rescaled to the median of the fresh ones.
    known = known * np.median(np.abs(fresh[:count])) / max(float(np.median(np.abs(known))), 1e-9)
    table = np.vstack([features(parts.x_cal[:count]), features(parts.x_train)])
    residuals = np.concatenate([fresh[:count], known])
    weights = np.concatenate([np.ones(count), np.full(len(known), _WEIGHT)])
    low, high = (boosted_quantile(table, residuals, a, weights) for a in (alpha / 2, 1 - alpha / 2))

    def ends(x: Tensor) -> tuple[Array, Array, Array]:
        at = features(x)
        lower, upper = low(at), high(at)
        return lower, upper, np.maximum(upper - lower, 1e-9)

    lower, upper, width = ends(parts.x_cal[count:])
    by = threshold(np.maximum(lower - fresh[count:], fresh[count:] - upper) / width, alpha)

    def predict(x: Tensor) -> tuple[Array, Array]:
        centre, (lower, upper, width) = predicted(model, x), ends(x)
        return centre + lower - by * width, centre + upper + by * width

    return predict


# -- last-layer Laplace ----------------------------------------------------------------------------


def laplace(model: nn.Sequential, parts: Split, alpha: float) -> Predict:
    """Return intervals whose scale is the predictive standard deviation of the last layer."""

    def hidden(x: Tensor) -> Array:
        with torch.no_grad():
            values = model[:-1](x).double().numpy()
        return np.column_stack([values, np.ones(len(values))])

    columns = hidden(parts.x_train)
    residuals = numbers(parts.y_train) - predicted(model, parts.x_train)
    values, vectors = np.linalg.eigh(columns.T @ columns)
    values = np.maximum(values, 0.0)
    layer = model[-1]
    assert isinstance(layer, nn.Linear)
    weights = np.concatenate([numbers(layer.weight), numbers(layer.bias)])
    precision, noise = 1.0, float(residuals @ residuals) / len(residuals)
    for _ in range(100):  # MacKay's fixed point of the evidence, at the weights as trained
        free = float((values / noise / (values / noise + precision)).sum())
        precision = free / float(weights @ weights)
        noise = float(residuals @ residuals) / max(len(residuals) - free, 1.0)

    def scale(x: Tensor) -> Array:
        turned = hidden(x) @ vectors
        spread: Array = np.sqrt(noise + (turned**2 / (values / noise + precision)).sum(axis=1))
        return spread

    errors = np.abs(numbers(parts.y_cal) - predicted(model, parts.x_cal))
    by = threshold(errors / scale(parts.x_cal), alpha)

    def predict(x: Tensor) -> tuple[Array, Array]:
        centre, half_width = predicted(model, x), by * scale(x)
        return centre - half_width, centre + half_width

    return predict


# -- EPICSCORE -------------------------------------------------------------------------------------

_PARTS, _WIDTH, _DROPOUT, _MASKS = 5, 64, 0.5, 50
_EPOCHS, _PATIENCE, _BATCH = 200, 15, 128


def epicscore(model: nn.Module, parts: Split, alpha: float, seed: int) -> Predict:
    """Return intervals whose half-width is a quantile of the score's predictive distribution."""
    scores = np.abs(numbers(parts.y_cal) - predicted(model, parts.x_cal))
    rows = len(scores)
    left = 1000 if rows >= 2000 else round(0.3 * rows)  # that calibrate, as in the published code
    order = torch.from_numpy(np.random.default_rng(seed).permutation(rows))
    learned, rest = order[left:], order[:left]
    unit, middle = float(scores[learned].std()) or 1.0, float(scores[learned].mean())
    target = torch.from_numpy((scores - middle) / unit).float()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = _learned_mixture(parts.x_cal[learned], target[learned])
        masks = torch.bernoulli(torch.full((_MASKS, 2, _WIDTH), 1 - _DROPOUT)) / (1 - _DROPOUT)

    def mixture(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, centres and widths of all masks' mixtures (n, masks * parts)."""
        first, second, last = network[0], network[4], network[8]
        with torch.no_grad():
            hidden = network[2](first(x).relu())[None] * masks[:, 0][:, None]
            flat = network[6](second(hidden).relu().flatten(0, 1)).unflatten(0, (_MASKS, -1))
            out = last(flat * masks[:, 1][:, None]).unflatten(-1, (3, _PARTS))
        shares = out[..., 0, :].softmax(-1) / _MASKS
        widths = nn.functional.softplus(out[..., 2, :]).clamp_min(1e-4)
        listed = [part.transpose(0, 1).flatten(1) for part in (shares, out[..., 1, :], widths)]
        return listed[0].double(), listed[1].double(), listed[2].double()

    def cdf(at: Tensor, mixed: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        shares, centres, widths = mixed
        below: Tensor = torch.special.ndtr((at[:, None] - centres) / widths)
        return (shares * below).sum(1)

    places = cdf(target[rest].double(), mixture(parts.x_cal[rest]))
    level = threshold(places.numpy(), alpha)

    def predict(x: Tensor) -> tuple[Array, Array]:
        centre = predicted(model, x)
        quantile = np.concatenate([_inverse(cdf, mixture(rows), level) for rows in x.split(1000)])
        half_width = np.maximum(middle + unit * quantile, 0.0)
        return centre - half_width, centre + half_width

    return predict


def _learned_mixture(x: Tensor, y: Tensor) -> nn.Sequential:
    """Train a mixture density network with dropout; 30 % of the rows are for early stopping."""
    layers: list[nn.Module] = []
    for wide in (x.shape[1], _WIDTH):
        layers += [nn.Linear(wide, _WIDTH), nn.ReLU(), nn.BatchNorm1d(_WIDTH), nn.Dropout(_DROPOUT)]
    network = nn.Sequential(*layers, nn.Linear(_WIDTH, 3 * _PARTS))
    optimizer = torch.optim.Adamax(network.parameters(), lr=1e-3)
    stop, best, waited = len(y) * 3 // 10, float("inf"), 0
    best_state = network.state_dict()
    for _ in range(_EPOCHS):
        network.train()
        for rows in (torch.randperm(len(y) - stop) + stop).split(_BATCH):
            if len(rows) > 1:
                optimizer.zero_grad()
                _negative_log_likelihood(network(x[rows]), y[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            loss = float(_negative_log_likelihood(network.eval()(x[:stop]), y[:stop]))
        waited = 0 if loss < best else waited + 1
        if loss < best:
            best = loss
            best_state = {name: one.clone() for name, one in network.state_dict().items()}
        if waited >= _PATIENCE:
            break
    network.load_state_dict(best_state)
    return network.eval()


def _negative_log_likelihood(out: Tensor, y: Tensor) -> Tensor:
    """Return the mean negative log likelihood of a mixture of normal distributions."""
    shares, centres, widths = out.unflatten(-1, (3, _PARTS)).unbind(-2)
    widths = nn.functional.softplus(widths).clamp_min(1e-4)
    each = -0.5 * ((y[:, None] - centres) / widths) ** 2 - widths.log()
    likely: Tensor = (shares.log_softmax(-1) + each).logsumexp(-1)
    return -likely.mean()


def _inverse(cdf: Callable[..., Tensor], mixed: tuple[Tensor, ...], level: float) -> Array:
    """Return where a mixture's distribution function is at the level, by bisection."""
    _, centres, widths = mixed
    low, high = (centres - 9 * widths).amin(1), (centres + 9 * widths).amax(1)
    if not level < 1:
        return np.full(len(low), np.inf)
    for _ in range(40):
        middle = (low + high) / 2
        below = cdf(middle, mixed) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return np.asarray(high.numpy())
