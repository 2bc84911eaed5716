"""The pinball loss, whose minimisers are quantiles."""

from __future__ import annotations

import torch
from torch import Tensor


def pinball_loss(quantiles: Tensor, y: Tensor, levels: tuple[float, ...] = (0.05, 0.95)) -> Tensor:
    """Return the mean pinball loss of several quantiles in the last dimension.

    Parameters
    ----------
    quantiles : Tensor
        Shape (..., k): the model's estimates of k quantiles of each target.
    y : Tensor
        Targets of shape (...), or (..., 1).
    levels : tuple of float, default=(0.05, 0.95)
        The k levels, each in (0, 1).

    Examples
    --------
    >>> y = torch.arange(101.0)
    >>> right = torch.tensor([10.0, 90.0]).expand(101, 2)
    >>> wrong = torch.tensor([30.0, 90.0]).expand(101, 2)
    >>> bool(pinball_loss(right, y, (0.1, 0.9)) < pinball_loss(wrong, y, (0.1, 0.9)))
    True
    """
    level = torch.tensor(levels, dtype=quantiles.dtype, device=quantiles.device)
    if not bool(((level > 0) & (level < 1)).all()):
        raise ValueError(f"quantile levels must lie strictly between 0 and 1, got {levels}")
    if quantiles.shape[-1] != len(levels):
        raise ValueError(
            f"{len(levels)} levels but {quantiles.shape[-1]} quantiles in the last dimension of "
            f"shape {tuple(quantiles.shape)}"
        )
    if y.shape != quantiles.shape[:-1]:
        if y.shape != (*quantiles.shape[:-1], 1):
            raise ValueError(
                f"target has shape {tuple(y.shape)}, quantiles {tuple(quantiles.shape)}"
            )
        y = y[..., 0]
    miss = y[..., None] - quantiles
    return torch.maximum(level * miss, (level - 1) * miss).mean()
