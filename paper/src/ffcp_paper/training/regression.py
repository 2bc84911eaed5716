"""Training of one network with the paper's settings: Adam at 5e-4, weight decay 1e-6, batch 64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ffcp import pinball_loss
from ffcp_paper.networks.regression import mlp

Loss = Callable[[Tensor, Tensor], Tensor]


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    epochs: int,
    loss: Loss = nn.functional.mse_loss,
    learning_rate: float = 5e-4,
    weight_decay: float = 1e-6,
    batch_size: int = 64,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
    stop: Callable[[nn.Module], bool] | None = None,
) -> nn.Module:
    """Fit ``model`` to (x, y) in place and leave it in eval mode.

    ``progress`` is called after every epoch, and so is ``stop``, with the model in eval mode; it
    returns whether to end the training. The order of the rows and the dropout depend on
    ``seed`` alone; the caller's random state is left as it was.

    >>> x = torch.linspace(0, 1, 256)[:, None]
    >>> _ = torch.manual_seed(0)
    >>> model = train(nn.Linear(1, 1), x, 3 * x, epochs=100, learning_rate=0.05)
    >>> bool((model(x) - 3 * x).abs().max() < 0.05)
    True
    """
    optimizer = torch.optim.Adam(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(epochs):
            model.train()
            for rows in torch.randperm(len(x)).split(batch_size):
                optimizer.zero_grad()
                loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
            progress()
            if stop is not None and stop(model.eval()):
                break
    return model.eval()


def train_as_published(
    x: Tensor,
    y: Tensor,
    *,
    seed: int,
    epochs: int = 1000,
    patience: int = 100,
    progress: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Train the paper's network by its protocol, for a number of epochs that fits the data.

    5 % of the rows pick the number of epochs with the smallest error, up to ``epochs``; then
    training starts over on all rows for that many. The search ends after ``patience`` epochs
    without improvement; the published code always runs all epochs.

    >>> x = torch.rand(200, 2)
    >>> model = train_as_published(x, x[:, 0], seed=0, epochs=3)
    >>> model(x).shape
    torch.Size([200, 1])
    """
    held = max(1, len(x) // 20)
    errors: list[float] = []

    def out_of_patience(model: nn.Module) -> bool:
        with torch.no_grad():
            errors.append(float(nn.functional.mse_loss(model(x[:held]), y[:held, None])))
        return len(errors) - errors.index(min(errors)) > patience

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        searching, fresh = mlp(x.shape[1]), mlp(x.shape[1])
    train(searching, x[held:], y[held:, None], epochs=epochs, seed=seed, progress=progress,
          stop=out_of_patience)  # fmt: skip
    best = errors.index(min(errors)) + 1
    return train(fresh, x, y[:, None], epochs=best, seed=seed, progress=progress)


def train_quantiles(
    x: Tensor,
    y: Tensor,
    levels: tuple[float, float] = (0.05, 0.95),
    *,
    epochs: int,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> nn.Module:
    """Train the paper's network with two outputs, the quantiles at a pair of levels.

    >>> x = torch.rand(512, 1)
    >>> model = train_quantiles(x, torch.rand(512), (0.1, 0.9), epochs=1)
    >>> model(x).shape
    torch.Size([512, 2])
    """
    low, high = levels
    if not 0 < low < high < 1:
        raise ValueError(f"levels must satisfy 0 < low < high < 1, got {levels}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = mlp(x.shape[1], outputs=2)
    return train(
        model,
        x,
        y,
        epochs=epochs,
        loss=lambda quantiles, target: pinball_loss(quantiles, target, levels),
        seed=seed,
        progress=progress,
    )
