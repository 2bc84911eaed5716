"""Load predictors of any class from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch  # noqa: F401 - for the example
from torch import nn

from ffcp import files
from ffcp.description import build, class_named, unsaved
from ffcp.persistence import Persistent


def load(path: str | Path, model: nn.Module, **given: Any) -> Any:
    """Load the predictor that was saved to a file, with its settings and calibration.

    Parameters
    ----------
    path : str or Path
        A file that ``predictor.save`` wrote. Nothing in it is unpickled or run.
    model : nn.Module
        The model, with the weights it was calibrated with.
    given : dict
        Arguments of the predictor's class that replace those in the file. Your own functions and
        objects are not in the file, and must be given here: ``scale=``, ``score=``,
        ``localizer=``, ``calibration=``, ``head=``.

    Returns
    -------
    Predictor
        Of the class that was saved: an :class:`ffcp.FFCP`, an :class:`ffcp.RAPS`, ...

    Examples
    --------
    >>> import ffcp, tempfile
    >>> model = nn.Linear(3, 1)  # yours is trained
    >>> old = ffcp.FFCP(model, "input", joint=True).calibrate(torch.randn(50, 3), torch.randn(50))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     old.save(f"{folder}/calibration.safetensors")
    ...     new = ffcp.load(f"{folder}/calibration.safetensors", model)
    >>> type(new).__name__, new.feature, new.joint, len(new.calibration)
    ('FFCP', 'input', True, 50)
    """
    if isinstance(path, nn.Module):
        raise TypeError("expected load(path, model), got a module in place of the path")
    tensors = files.read(path)
    with files.refused(path):
        own = {n: t for n, t in tensors.items() if n.startswith(("score.", "calibration."))}
        described = files.unseal(tensors["_extra_state"], own)["predictor"]
        kind = described.get("class")
        if kind is None:
            raise ValueError(
                "it was saved by a class of your own: construct the predictor, and call "
                f"its load({str(path)!r})"
            )
        if not issubclass(class_named(kind), Persistent):
            raise ValueError(f"{kind!r} is not a predictor")
        described = {name: value for name, value in described.items() if name not in given}
        lost = {name: list(unsaved(value)) for name, value in described.items()}
        listed = ", ".join(f"{name}=... ({', '.join(what)})" for name, what in lost.items() if what)
        if listed:
            raise ValueError(
                f"this {kind} was saved with parts that a file cannot hold: pass "
                f"ffcp.load(path, model, {listed}), or construct the predictor and call its "
                "load(path)"
            )
        del described["class"]
        arguments = {name: build(value, model) for name, value in described.items()}
        predictor = class_named(kind)(model=model, **arguments, **given)
    return predictor.load(path)
