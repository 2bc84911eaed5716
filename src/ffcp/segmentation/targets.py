"""Label maps as regression targets: a number for each pixel and class."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.segmentation.sets import check_maps, known_labels

SMALLEST = 0.01  # the smallest probability in targets


def double_log(p: Tensor | float) -> Tensor:
    """Return log(-log p), which maps probabilities to the whole line and decreases in p.

    Parameters
    ----------
    p : Tensor or float
        Probabilities, between 0 and 1.

    Examples
    --------
    >>> double_log(torch.tensor([0.99, 0.5, 0.01]))
    tensor([-4.6002, -0.3665,  1.5272])
    """
    return torch.as_tensor(p).log().neg().log()


def targets(
    labels: Tensor,
    classes: int,
    *,
    ignore: int | None = None,
    blur: float = 1.0,
    smallest: float = SMALLEST,
) -> Tensor:
    """Return regression targets for label maps: log(-log) of blurred one-hot maps.

    Parameters
    ----------
    labels : Tensor
        Integer label maps, (n, height, width).
    classes : int
        Number of classes; labels are 0 to classes - 1.
    ignore : int, default=None
        The label that marks unlabelled pixels; their targets are NaN, and they do not contribute
        to the blur of others.
    blur : float, default=1.0
        Standard deviation of the Gaussian blur, in pixels; 0 for none.
    smallest : float, default=0.01
        Probabilities are clipped to [smallest, 1 - smallest], since log(-log) of 0 and 1 is
        infinite.

    Returns
    -------
    Tensor
        Shape (n, classes, height, width), float32.

    Examples
    --------
    >>> labels = torch.tensor([[[0, 0, 1, 1]]])
    >>> targets(labels, 2, blur=0)[0, 1, 0]
    tensor([ 1.5272,  1.5272, -4.6002, -4.6002])
    """
    if labels.dim() != 3:
        raise ValueError(f"'labels' must have shape (n, height, width), got {tuple(labels.shape)}")
    if not 0 < smallest < 0.5:
        raise ValueError(f"'smallest' must lie between 0 and 0.5, got {smallest}")
    if not 0 <= blur < math.inf:
        raise ValueError(f"'blur' must be at least 0, got {blur}")
    maps, known = known_labels(labels, classes, ignore)
    weight = known[:, None].float()
    hot = functional.one_hot(maps, classes).permute(0, 3, 1, 2).float() * weight
    if blur:
        # Divided by the blurred weight, which is 0 beyond the border and in ignored pixels.
        hot = _blurred(hot, blur) / _blurred(weight, blur).clamp_min(1e-12)
    numbers = double_log(hot.clamp(smallest, 1 - smallest))
    return numbers.masked_fill(~known[:, None], math.nan)


def _blurred(maps: Tensor, sigma: float) -> Tensor:
    """Return a Gaussian blur of (n, c, height, width), zero beyond the border."""
    radius = max(1, math.ceil(3 * sigma))
    steps = torch.arange(-radius, radius + 1, device=maps.device, dtype=maps.dtype)
    kernel = torch.exp(-0.5 * (steps / sigma).square())
    kernel = kernel / kernel.sum()
    n, c, height, width = maps.shape
    flat = maps.reshape(n * c, 1, height, width)
    flat = functional.conv2d(flat, kernel[None, None, :, None], padding=(radius, 0))
    flat = functional.conv2d(flat, kernel[None, None, None, :], padding=(0, radius))
    return flat.view_as(maps)


class DoubleLog(nn.Module):
    """Module from logits (n, classes, height, width) to log(-log p), p the softmax over classes.

    After a network trained with cross entropy it returns numbers on the scale of :func:`targets`.

    Parameters
    ----------
    smallest : float, default=0.0
        That of the targets: p is mapped linearly to [smallest, 1 - smallest], so that a network
        with probabilities beyond those of the targets has no errors from them. With 0 it is not
        mapped, and computed without rounding p to 0 or 1, so the gradient never vanishes.

    Examples
    --------
    >>> DoubleLog()(torch.tensor([[[[0.0]], [[0.0]]]]))[0, :, 0, 0]
    tensor([-0.3665, -0.3665])
    >>> certain = torch.tensor([[[[100.0]], [[0.0]]]])
    >>> DoubleLog()(certain)[0, :, 0, 0]  # -100 and log(100)
    tensor([-100.0000,    4.6052])
    >>> DoubleLog(0.01)(certain)[0, :, 0, 0]
    tensor([-4.6002,  1.5272])
    """

    def __init__(self, smallest: float = 0.0) -> None:
        super().__init__()
        if not 0 <= smallest < 0.5:
            raise ValueError(f"'smallest' must be at least 0 and below 0.5, got {smallest}")
        self.smallest = smallest

    def forward(self, logits: Tensor) -> Tensor:
        """Return log(-log p) of logits."""
        check_maps(logits)  # for a clear message: the code below would fail with an obscure one
        return self._of_odds(_of_others(logits) - logits)

    def bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Return bounds on the output, given bounds on the logits.

        The output of a class decreases in its own logit and increases in all others.
        """
        low = self._of_odds(_of_others(lower) - upper)
        high = self._of_odds(_of_others(upper) - lower)
        # Infinite logits can cause inf - inf: no bound.
        return low.where(~low.isnan(), -math.inf), high.where(~high.isnan(), math.inf)

    def _of_odds(self, against: Tensor) -> Tensor:
        """Return log(-log p), from the log of the odds against a class."""
        if not self.smallest:
            return _log_softplus(against)
        return double_log(self.smallest + (1 - 2 * self.smallest) * torch.sigmoid(-against))

    def extra_repr(self) -> str:
        """Return the setting for the module's repr."""
        return f"smallest={self.smallest}"


def _of_others(logits: Tensor) -> Tensor:
    """Return, for every class, the logsumexp of the others."""
    top = logits.argmax(dim=1, keepdim=True)
    is_top = torch.zeros_like(logits, dtype=torch.bool).scatter(1, top, True)
    everything = logits.logsumexp(dim=1, keepdim=True)
    others = logits.masked_fill(is_top, -math.inf).logsumexp(dim=1, keepdim=True)
    # log(S - e^z) = log S + log(1 - e^(z - log S)): safe unless the class is nearly all of S,
    # and only the top one can be.
    share = (logits - everything).masked_fill(is_top, -1.0)
    rest = everything + torch.log1p(-share.exp())
    return torch.where(is_top, others, rest)


def _log_softplus(t: Tensor) -> Tensor:
    """Return log(log(1 + e^t)), which is t far below zero, where softplus rounds to 0."""
    low = t < -15
    safe = t.masked_fill(low, 0.0)
    return torch.where(low, t, functional.softplus(safe).log())
