"""A model whose predictions were computed before."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Stored(nn.Module):
    """Stands in for a model that was run before: returns the prediction among its inputs.

    The input is the prediction alone, or a dict with ``"prediction"`` and whatever else a scale
    or a localizer uses, such as an estimate of difficulty for each row. The constructor takes no
    arguments; the parameters are those of the call.

    Parameters
    ----------
    prediction : Tensor
        The predictions, a row per row; with :class:`ffcp.CQR` two columns of quantiles.
    **known : dict
        Whatever else the dict holds. It is ignored here; scales find it in ``out.x``.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> sigma = torch.rand(200) + 0.1
    >>> known = {"prediction": torch.zeros(200), "sigma": sigma}
    >>> predictor = ffcp.IntervalPredictor(Stored(), scale=lambda out: out.x["sigma"])
    >>> predictor = predictor.calibrate(known, sigma * torch.randn(200))
    >>> interval = predictor.predict_interval(known, alpha=0.1)
    >>> bool((interval.width / sigma).std() < 1e-5)  # widths are proportional to sigma
    True
    """

    #: Nothing is computed here, so batches may be larger than a network's.
    rows_at_once = 2**17
    #: Autocast changes nothing here; in subclasses it may.
    computes = False

    def forward(self, prediction: Tensor, **known: Any) -> Tensor:
        """Return the prediction, a copy that the caller may write to."""
        return prediction.clone()
