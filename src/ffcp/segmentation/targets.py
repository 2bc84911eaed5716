"""Label maps as targets for bands: numbers to regress on, one per pixel and class."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp.segmentation.sets import check_maps, known_labels

SMALLEST = 0.01  # probability in targets


def double_log(p: Tensor | float) -> Tensor:
    """Map probabilities to the whole line by log(-log p): near 1 far below, near 0 above.

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
    """Turn label maps into numbers to regress on: blurred one-hot maps, under log(-log).

    Parameters
    ----------
    labels
        Integer label maps, (n, height, width).
    classes
        Number of classes; labels are 0 to classes - 1.
    ignore
        The label of pixels that have none; their targets are NaN, and they do not blur into
        others.
    blur
        Standard deviation of the Gaussian blur, in pixels; 0 for none.
    smallest
        Probabilities are kept within [smallest, 1 - smallest], since log(-log) of 0 and 1 is
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
        raise ValueError(f"labels must have shape (n, height, width), got {tuple(labels.shape)}")
    if not 0 < smallest < 0.5:
        raise ValueError(f"smallest must lie between 0 and 0.5, got {smallest}")
    if not 0 <= blur < math.inf:
        raise ValueError(f"blur must be at least 0, got {blur}")
    maps, known = known_labels(labels, classes, ignore)
    weight = known[:, None].float()
    hot = functional.one_hot(maps, classes).permute(0, 3, 1, 2).float() * weight
    if blur:
        # Divided by the blurred weight: beyond the border and in ignored pixels there is nothing.
        hot = _blurred(hot, blur) / _blurred(weight, blur).clamp_min(1e-12)
    numbers = double_log(hot.clamp(smallest, 1 - smallest))
    return numbers.masked_fill(~known[:, None], math.nan)


def _blurred(maps: Tensor, sigma: float) -> Tensor:
    """Gaussian blur of (n, c, height, width), zero beyond the border."""
    reach = max(1, math.ceil(3 * sigma))
    steps = torch.arange(-reach, reach + 1, device=maps.device, dtype=maps.dtype)
    kernel = torch.exp(-0.5 * (steps / sigma).square())
    kernel = kernel / kernel.sum()
    n, c, height, width = maps.shape
    flat = maps.reshape(n * c, 1, height, width)
    flat = functional.conv2d(flat, kernel[None, None, :, None], padding=(reach, 0))
    flat = functional.conv2d(flat, kernel[None, None, None, :], padding=(0, reach))
    return flat.view_as(maps)


class DoubleLog(nn.Module):
    """From logits (n, classes, height, width) to log(-log p), p the softmax over classes.

    Behind a network that was trained with cross entropy it gives the numbers that
    :func:`targets` makes of label maps.

    Parameters
    ----------
    smallest
        Of the targets: p is squeezed into [smallest, 1 - smallest], smoothly, so that a network
        that is surer than the targets can be is not counted as wrong. With 0 it is not squeezed,
        and computed without rounding p to 0 or 1, so the gradient never vanishes.

    Examples
    --------
    >>> DoubleLog()(torch.tensor([[[[0.0]], [[0.0]]]]))[0, :, 0, 0]
    tensor([-0.3665, -0.3665])
    >>> sure = torch.tensor([[[[100.0]], [[0.0]]]])
    >>> DoubleLog()(sure)[0, :, 0, 0]  # -100 and log(100)
    tensor([-100.0000,    4.6052])
    >>> DoubleLog(0.01)(sure)[0, :, 0, 0]
    tensor([-4.6002,  1.5272])
    """

    def __init__(self, smallest: float = 0.0) -> None:
        super().__init__()
        if not 0 <= smallest < 0.5:
            raise ValueError(f"smallest must be at least 0 and below 0.5, got {smallest}")
        self.smallest = smallest

    def forward(self, logits: Tensor) -> Tensor:
        """Map logits."""
        check_maps(logits)  # what follows would fail in a way that says nothing of the model
        return self._of_odds(_of_others(logits) - logits)

    def bounds(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Bound the output, given bounds on the logits: it grows with all of them but its own."""
        low = self._of_odds(_of_others(lower) - upper)
        high = self._of_odds(_of_others(upper) - lower)
        # Infinite logits can leave inf - inf: no bound.
        return low.where(~low.isnan(), -math.inf), high.where(~high.isnan(), math.inf)

    def _of_odds(self, against: Tensor) -> Tensor:
        """Map the log of the odds against a class."""
        if not self.smallest:
            return _log_softplus(against)
        return double_log(self.smallest + (1 - 2 * self.smallest) * torch.sigmoid(-against))

    def extra_repr(self) -> str:
        """Show the setting."""
        return f"smallest={self.smallest}"


def _of_others(logits: Tensor) -> Tensor:
    """Return for every class the logsumexp of the others."""
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
    """log(log(1 + e^t)), which is t far below zero, where softplus itself rounds to nothing."""
    low = t < -15
    safe = t.masked_fill(low, 0.0)
    return torch.where(low, t, functional.softplus(safe).log())
