"""Arguments that every predictor takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TypedDict

from ffcp.network.model_output import Output


class Running(TypedDict, total=False):
    """Keyword arguments of every predictor; documented in :class:`ffcp.IntervalPredictor`."""

    selection_fraction: float
    selection_alpha: float
    seed: int | None
    batch_size: int | None
    output: Output


def known_only(maker: type, given: Iterable[str], known: type) -> None:
    """Raise TypeError for unknown keywords; list the known ones.

    >>> class Ruler:
    ...     def __init__(self, length, **running): ...
    >>> known_only(Ruler, ["sed"], Running)
    Traceback (most recent call last):
    TypeError: Ruler takes no argument 'sed': there are length, selection_fraction, selection_alpha,
    seed, batch_size, output
    """
    unknown = [name for name in given if name not in known.__annotations__]
    if unknown:
        parameters = list(inspect.signature(maker.__init__).parameters.values())[1:]  # type: ignore[misc]
        own = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        later = {
            "alpha": "predict_interval or predict_set",
            "groups": "calibrate, and to predict_interval or predict_set",
            "pac": "predict_interval",
        }
        if unknown[0] in later:
            raise TypeError(
                f"{maker.__name__} takes no argument {unknown[0]!r}: give it to {later[unknown[0]]}"
            )
        raise TypeError(
            f"{maker.__name__} takes no argument {', '.join(map(repr, unknown))}: there are "
            f"{', '.join(dict.fromkeys([*own, *known.__annotations__]))}"
        )
