"""Training of the network with a time limit and early stopping."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ffcp.regression.learned.network import ascending
from ffcp.tables import trees
from ffcp.tables.network import TableNetwork, pinball

_BATCH = 256
_PATIENCE = 20  # epochs without a smaller validation loss
_AVERAGED = 0.998  # decay of the moving average of weights
_PINBALL = 4.0  # weight of the pinball loss, to be about as large as the squared error
_TREES = 0.25  # share of the time limit; most tables need less
_LOOK, _SHARE = 2.0, 10.0  # seconds between validations, at least this many times their duration
Progress = Callable[[float], None]  # called with the share of the time limit that has passed


@dataclass(frozen=True)
class Training:
    """The summary of a training: epochs, seconds, the best validation loss and why it ended.

    ``loss`` is the mean squared error in units of the target's variance, plus the pinball loss of
    quantiles if there are any; or the cross entropy.
    """

    epochs: float
    seconds: float
    loss: float
    ended: str


def training_summary(training: Sequence[Training]) -> str:
    """Return one line on the training of one network, or of several.

    >>> first, second = Training(8.0, 1.26, 0.1, "by Ctrl-C"), Training(12.4, 2, 0.1, "by Ctrl-C")
    >>> training_summary([first, second])
    '2 networks, 8 to 12.4 epochs in 3.3 s, ended by Ctrl-C'
    """
    epochs = sorted(run.epochs for run in training)
    networks = f"{len(training)} networks, {epochs[0]:.4g} to " if len(training) > 1 else ""
    ended = " or ".join(dict.fromkeys(run.ended for run in training))
    seconds = sum(run.seconds for run in training)
    return f"{networks}{epochs[-1]:.4g} epochs in {seconds:.1f} s, ended {ended}"


def train(
    network: TableNetwork,
    x: Tensor,
    y: Tensor,
    x_stop: Tensor,
    y_stop: Tensor,
    *,
    seconds: float,
    seed: int,
    progress: Progress = lambda share: None,
    most_epochs: int = 1000,
) -> Training:
    """Train until the validation loss stops improving, the time limit, or Ctrl-C.

    Targets are numbers, for the squared error and quantiles, or classes, for the cross entropy.
    The network is left in eval mode with the weights of the smallest validation loss: moving
    averages, which are better than the last weights and need no learning rate schedule. Boosted
    trees are added to a network with quantiles, if LightGBM is installed.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=3e-4)
    averaged: Any = AveragedModel(network, multi_avg_fn=_towards)
    begin = time.monotonic()  # after torch has loaded its optimizers
    boosted = None
    if network.shape.has_quantiles and find_spec("lightgbm") is not None:
        transform = network.quantiles.transform
        validation = (x_stop, y_stop, transform(y_stop))
        boosted = trees.learn(x, y, transform(y), validation, _TREES * seconds, seed)
    batch = min(_BATCH, max(8, len(x) // 8))
    best, best_epoch, best_weights = math.inf, 0.0, copy.deepcopy(network.state_dict())
    epochs, ended = 0.0, ""
    wait, last_look = _LOOK, time.monotonic()  # trees may have taken longer than a look
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # of dropout
            while not ended:
                network.train()
                for rows in torch.randperm(len(x), generator=generator).split(batch):
                    if len(rows) < 2 and len(x) > 1:
                        continue
                    _step(network, optimizer, x[rows], y[rows])
                    averaged.update_parameters(network)
                    epochs += len(rows) / len(x)
                    now = time.monotonic()
                    if now - begin > seconds or now - last_look > wait:
                        break
                looked = time.monotonic()
                progress(min(1.0, (looked - begin) / seconds))
                loss = loss_on(averaged.module, x_stop, y_stop)
                if loss < best:
                    best, best_epoch = loss, epochs
                    best_weights = copy.deepcopy(averaged.module.state_dict())
                last_look = time.monotonic()
                wait = max(_LOOK, _SHARE * (last_look - looked))
                if looked - begin > seconds:
                    ended = "at the time limit"
                elif epochs - best_epoch > _PATIENCE:
                    ended = "by early stopping"
                elif epochs >= most_epochs:
                    ended = f"after {most_epochs} epochs"
    except KeyboardInterrupt:
        if not math.isfinite(best):
            raise  # there are no weights yet
        ended = "by Ctrl-C, with the best weights so far"
    network.load_state_dict(best_weights)
    network.eval()
    if boosted is not None:
        network.join(boosted, x_stop, y_stop)
    return Training(round(epochs, 2), round(time.monotonic() - begin, 2), best, ended)


def _towards(means: Any, weights: Any, steps: Any) -> None:
    """Update the moving average of the weights."""
    decay = min(_AVERAGED, (int(steps) + 1) / (int(steps) + 10))  # smaller at the start
    torch._foreach_lerp_(list(means), list(weights), 1 - decay)


def _step(network: TableNetwork, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Take one step on the mean of the members' losses, so that each learns separately."""
    outputs, raw = network.members(x)
    optimizer.zero_grad()
    _loss(network, outputs, None if raw is None else ascending(raw), y).backward()
    # Clipped separately, so that the large squared error of an outlier cannot dominate the rest.
    named = list(network.named_parameters())
    for is_head in (True, False):
        weights = [weight for name, weight in named if name.startswith("output.") == is_head]
        nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()


def _loss(network: TableNetwork, outputs: Tensor, quantiles: Tensor | None, y: Tensor) -> Tensor:
    """Return the mean loss of members, (n, members, outputs), and their quantiles, if any."""
    members = outputs.shape[1]
    if not y.is_floating_point():
        return nn.functional.cross_entropy(outputs.flatten(0, 1), y.repeat_interleave(members))
    loss = nn.functional.mse_loss(outputs[..., 0], y[:, None].expand(-1, members))
    if quantiles is None:
        return loss
    targets = network.quantiles.transform(y)[:, None, None]
    return loss + _PINBALL * pinball(targets - quantiles).mean()


@torch.no_grad()
def loss_on(network: TableNetwork, x: Tensor, y: Tensor) -> float:
    """Return the loss of the members' mean on rows."""
    network.eval()
    total = 0.0
    for rows in torch.arange(len(x)).split(2048):
        outputs, raw = network.members(x[rows])
        quantiles = None if raw is None else ascending(raw).mean(dim=1, keepdim=True)
        mean = outputs.mean(dim=1, keepdim=True)
        total += float(_loss(network, mean, quantiles, y[rows])) * len(rows)
    return total / len(x)
