"""Predictions that are known already, in the place of a network."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Stored(nn.Module):
    """Stands in for a model that was run before: gives back the prediction among its inputs.

    The input is the prediction alone, or a dict with ``"prediction"`` and whatever else a scale
    or a localizer looks at, such as an estimate of difficulty for each row. It is made with
    nothing; what it is called with stands under Parameters.

    Parameters
    ----------
    prediction : Tensor
        The predictions, a row per row; with :class:`ffcp.CQR` two columns of quantiles.
    **known
        Whatever else stands in the dict. It is passed over here; pieces find it in ``seen.x``.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> sigma = torch.rand(200) + 0.1
    >>> known = {"prediction": torch.zeros(200), "sigma": sigma}
    >>> bands = ffcp.IntervalPredictor(Stored(), scale=lambda out: out.x["sigma"])
    >>> band = bands.calibrate(known, sigma * torch.randn(200)).predict_interval(known, alpha=0.1)
    >>> bool(((band.upper - band.lower) / sigma).std() < 1e-5)  # as wide as sigma says
    True
    """

    #: Nothing is computed here, so batches may be larger than those that suit a network.
    rows_at_once = 2**17
    #: Autocast, say, changes nothing here; in classes made of this one it may.
    computes = False

    def forward(self, prediction: Tensor, **known: Any) -> Tensor:
        """Return the prediction, a copy that the caller may write to."""
        return prediction.clone()
