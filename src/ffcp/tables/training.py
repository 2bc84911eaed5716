"""Training with a time limit and early stopping, on rows apart; what is interrupted is kept."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ffcp.tables.network import TableNetwork

_BATCH = 256
_LOOK = 2.0  # seconds: how long at most until the rows apart are looked at again
Progress = Callable[[float], None]  # told the share of the time limit that has gone


@dataclass(frozen=True)
class Training:
    """How a training went: why it ended, and the loss on the rows apart, which chose the weights.

    ``loss`` is the mean squared error in units of the target's variance, or the cross entropy.
    """

    epochs: float
    seconds: float
    loss: float
    ended: str


def told(training: Sequence[Training]) -> str:
    """Say how the training of one network went, or of several, in a line.

    >>> told([Training(8.0, 1.26, 0.1, "by Ctrl-C"), Training(12.4, 2, 0.1, "by Ctrl-C")])
    '2 networks, 8 to 12.4 epochs in 3.3 s, ended by Ctrl-C'
    """
    epochs = sorted(one.epochs for one in training)
    many = f"{len(training)} networks, {epochs[0]:.4g} to " if len(training) > 1 else ""
    ended = " or ".join(dict.fromkeys(one.ended for one in training))
    seconds = sum(one.seconds for one in training)
    return f"{many}{epochs[-1]:.4g} epochs in {seconds:.1f} s, ended {ended}"


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
    patience: int = 20,
    most_epochs: int = 1000,
) -> Training:
    """Train until rows apart gain nothing more, time is over, or somebody presses Ctrl-C.

    Targets are numbers, for the squared error, or classes, for the cross entropy. The network is
    left in eval mode with the weights that were best on the rows apart.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=3e-4)
    begin = last_look = time.monotonic()  # torch has loaded its optimizers now
    batch = min(_BATCH, max(8, len(x) // 8))
    best, kept, best_epoch, done = math.inf, copy.deepcopy(network.state_dict()), 0.0, 0.0
    ended = f"after {most_epochs} epochs"
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # of dropout
            while done < most_epochs:
                network.train()
                order = torch.randperm(len(x), generator=generator)
                over = False
                for rows in order.split(batch):
                    if len(rows) < 2 and len(x) > 1:
                        continue
                    _step(network, optimizer, x[rows], y[rows])
                    done += len(rows) / len(x)
                    now = time.monotonic()
                    if (over := now - begin > seconds) or now - last_look > _LOOK:
                        break
                progress(min(1.0, (time.monotonic() - begin) / seconds))
                loss = loss_on(network, x_stop, y_stop)
                last_look = time.monotonic()
                if loss < best:
                    best, kept, best_epoch = loss, copy.deepcopy(network.state_dict()), done
                if over:
                    ended = "when the time was over"
                    break
                if done - best_epoch > patience:
                    ended = "when rows apart gained nothing more"
                    break
    except KeyboardInterrupt:
        if not math.isfinite(best):
            raise  # nothing is learned yet
        ended = "by Ctrl-C; the best so far is kept"
    network.load_state_dict(kept)
    network.eval()
    return Training(round(done, 2), round(time.monotonic() - begin, 2), best, ended)


def _step(network: TableNetwork, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Let every member learn on its own: the loss is the mean of theirs, not that of their mean."""
    outputs = network.members(x)
    members = outputs.shape[1]
    if y.is_floating_point():
        loss = nn.functional.mse_loss(outputs[..., 0], y[:, None].expand(-1, members))
    else:
        loss = nn.functional.cross_entropy(outputs.flatten(0, 1), y.repeat_interleave(members))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def loss_on(network: TableNetwork, x: Tensor, y: Tensor) -> float:
    """Measure the loss of the members' mean on rows."""
    network.eval()
    total = 0.0
    for rows in torch.arange(len(x)).split(2048):
        outputs = network(x[rows])
        if y.is_floating_point():
            total += float((outputs[:, 0] - y[rows]).square().sum())
        else:
            total += float(nn.functional.cross_entropy(outputs, y[rows], reduction="sum"))
    return total / len(x)
