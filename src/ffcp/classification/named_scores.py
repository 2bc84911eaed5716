"""Constructors of the named label scores: LAC, APS, RAPS and FFRAPS."""

from __future__ import annotations

from ffcp.classification.rules import SOFTMAX
from ffcp.classification.scores import APS, FFRAPS, LAC, RAPS, RuleScore


def LACScore(temperature: float | str = 1.0) -> RuleScore:  # noqa: N802 - reads as a piece
    """Return the score of LAC: one minus the label's probability.

    Parameters
    ----------
    temperature : float or str, default=1.0
        Logits are divided by it; ``"fit"`` fits it by likelihood on rows set aside, which are not
        used for calibration.

    Returns
    -------
    LabelScore
        For :class:`ffcp.SetPredictor`; :class:`ffcp.LAC` is both in one.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> sets = ffcp.SetPredictor(model, LACScore()).calibrate(x, y).predict_set(x[:5], alpha=0.1)
    >>> sets.mask.shape
    torch.Size([5, 3])
    """
    return RuleScore(LAC, temperature, randomized=False)


def APSScore(  # noqa: N802
    temperature: float | str = 1.0, *, randomized: bool = True
) -> RuleScore:
    """Return the score of APS: the sum of the probabilities of all labels up to this one.

    Parameters
    ----------
    temperature : float or str, default=1.0
        As in :func:`ffcp.scores.LAC`.
    randomized : bool, default=True
        Count only a random share of the label's own probability. With ``False`` the share is
        random in calibration only; sets hold every label that some share would include.

    Returns
    -------
    LabelScore
        For :class:`ffcp.SetPredictor`; :class:`ffcp.APS` is both in one.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> sets = ffcp.SetPredictor(model, APSScore(randomized=False)).calibrate(x, y)
    >>> sets.predict_set(x[:5], alpha=0.1).mask.shape
    torch.Size([5, 3])
    """
    return RuleScore(APS, temperature, randomized=randomized)


def RAPSScore(  # noqa: N802
    lam: float | None = None,
    kreg: int | None = None,
    *,
    temperature: float | str = 1.0,
    tune: str | None = None,
    randomized: bool = True,
    allow_empty: bool = False,
) -> RuleScore:
    """Return the score of RAPS: that of APS plus a penalty on ranks.

    Parameters
    ----------
    lam : float, default=None
        Penalty for every rank beyond ``kreg``: the score of the label at rank r, counted from 1,
        is that of APS plus lam max(0, r - kreg). 0.01 if neither given nor tuned.
    kreg : int, default=None
        How many ranks have no penalty. 5 if neither given nor tuned.
    temperature : float or str, default=1.0
        As in :func:`ffcp.scores.LAC`.
    tune : str, default=None
        ``"size"`` or ``"coverage"``: those of ``lam`` and ``kreg`` that are left out are tuned on
        rows set aside, which are not used for calibration, for small sets, or for equal coverage
        of sets of all sizes.
    randomized : bool, default=True
        As in :func:`ffcp.scores.APS`.
    allow_empty : bool, default=False
        Whether sets may be empty when candidates are compared.

    Returns
    -------
    LabelScore
        For :class:`ffcp.SetPredictor`; :class:`ffcp.RAPS` is both in one.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = torch.nn.Linear(4, 9), torch.randn(500, 4), torch.randint(0, 9, (500,))
    >>> sets = ffcp.SetPredictor(model, RAPSScore(lam=0.1, kreg=2), seed=0).calibrate(x, y)
    >>> sets.predict_set(x[:5], alpha=0.1).mask.shape
    torch.Size([5, 9])
    """
    _check_tuning(tune, lam=lam, kreg=kreg)
    return RuleScore(
        RAPS, temperature, lam, kreg, tune=tune, randomized=randomized, allow_empty=allow_empty
    )


def FFRAPSScore(  # noqa: N802
    delta: float | None = None,
    lam: float | None = None,
    kreg: int | None = None,
    gradient: str = SOFTMAX,
    feature: str | None = None,
    *,
    temperature: float | str = 1.0,
    tune: str | None = None,
    randomized: bool = True,
    allow_empty: bool = False,
) -> RuleScore:
    """Return the score of FFRAPS: that of RAPS with a gradient norm added.

    Parameters
    ----------
    delta : float, default=None
        Weight of the gradient norm; 0 is RAPS. 0.01 if neither given nor tuned.
    lam : float, default=None
        As in :func:`ffcp.scores.RAPS`.
    kreg : int, default=None
        As in :func:`ffcp.scores.RAPS`.
    gradient : str, default="softmax"
        ``"softmax"`` takes the gradient of each label's probability with respect to the logits;
        ``"feature"`` that of the most probable label's probability with respect to a layer.
    feature : str, default=None
        The layer for ``gradient="feature"``, by its dotted name, or ``"input"``.
    temperature : float or str, default=1.0
        As in :func:`ffcp.scores.RAPS`.
    tune : str, default=None
        As in :func:`ffcp.scores.RAPS`.
    randomized : bool, default=True
        As in :func:`ffcp.scores.RAPS`.
    allow_empty : bool, default=False
        As in :func:`ffcp.scores.RAPS`; ``tune`` also chooses ``delta``, if that is left out.

    Returns
    -------
    LabelScore
        For :class:`ffcp.SetPredictor`; :class:`ffcp.FFRAPS` is both in one.

    Examples
    --------
    >>> import ffcp, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 9))
    >>> x, y = torch.randn(500, 4), torch.randint(0, 9, (500,))
    >>> score = FFRAPSScore(0.05, lam=0.1, kreg=2, gradient="feature", feature="0")
    >>> sets = ffcp.SetPredictor(model, score, seed=0).calibrate(x, y)
    >>> sets.predict_set(x[:5], alpha=0.1).mask.shape
    torch.Size([5, 9])
    """
    _check_tuning(tune, lam=lam, kreg=kreg, delta=delta)
    return RuleScore(
        FFRAPS, temperature, lam, kreg, delta, gradient, feature, tune, randomized, allow_empty
    )


def _check_tuning(tune: str | None, **settings: float | None) -> None:
    """Raise ValueError if there is nothing to tune."""
    if tune and None not in settings.values():
        raise ValueError(
            f"'tune' is {tune!r}, but all of {', '.join(settings)} are given: leave out those that "
            "are to be tuned"
        )
