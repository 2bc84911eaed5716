"""Writing of a calibrated predictor to one ONNX file, completely or not at all."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffcp import __version__, files
from ffcp.classification.set_predictor import SetPredictor
from ffcp.classification.sets import LabelSet
from ffcp.conformal.mondrian import Mondrian
from ffcp.conformal.rank import ONE_LEVEL, requested_alphas, rows_needed
from ffcp.export import accepting, checking
from ffcp.export.graph import ROWS, onnx_model, rows_uncounted
from ffcp.export.steps import GROUP, RANDOM, ROUNDING, IntervalSteps, SetSteps
from ffcp.extras import needed
from ffcp.network import forward, inputs
from ffcp.predictor import Predictor
from ffcp.progress import progress
from ffcp.warnings import FFCPWarning, warn

_ONE_AT_A_TIME = threading.Lock()  # torch's exporter has global state


def export(
    predictor: Predictor,
    path: str | Path,
    example: Any,
    alphas: Any = ONE_LEVEL,
    random: float | None = None,
    confidence_level: Any = None,
    unknown: Mapping[str, Any] | None = None,
) -> None:
    """Write a predictor to a file; see :meth:`ffcp.predictor.Predictor.export`.

    Parameters
    ----------
    predictor : Predictor
        A calibrated predictor.
    path : str or Path
        The ONNX file to write.
    example : array-like, frame, tuple or dict
        Rows, on which the file is compared with the library.
    alphas : sequence of float, default=(0.1,)
        Levels of the intervals or sets.
    random : float, default=None
        The random number of randomised sets, in [0, 1).
    confidence_level : float or sequence of float, default=None
        1 - alpha, in place of ``alphas``.
    """
    if confidence_level is not None and alphas is ONE_LEVEL:
        alphas = None
    levels, _ = requested_alphas(alphas, confidence_level, unknown or {})
    if len(set(map(_level_name, levels))) < len(levels):
        raise ValueError(f"'alphas' must differ in their first 12 digits, got {alphas!r}")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        needed(package, "export", "export")
    accepting.check(predictor)
    must_be_new_enough(torch.__version__)
    _check_random(predictor, random)
    with _ONE_AT_A_TIME:
        writing = _Writing(predictor, example, levels, random)
        data = writing.data()
    files.put(path, data)
    writing.warn_of_infinite()


class _Writing:
    """The state of one export."""

    def __init__(
        self, predictor: Any, example: Any, alphas: list[Fraction], random: float | None
    ) -> None:
        self._predictor, self._alphas = predictor, alphas
        self._state = state = predictor.calibrated()
        x = inputs.Reader(predictor.model, state.layout)(example)
        if not inputs.row_count(x):
            raise ValueError(
                "'example' has no rows: pass some, the file is compared with the library on them"
            )
        self._x = checking.rows_like(x)
        groups = state.calibration
        self._labels = list(groups.groups) if isinstance(groups, Mondrian) else None
        few = inputs.take(self._x, slice(0, 2))
        output = forward.run_batch(predictor.model, few, state.requires).output
        self._steps: SetSteps | IntervalSteps = (
            SetSteps(predictor, alphas, output, random)
            if isinstance(predictor, SetPredictor)
            else IntervalSteps(predictor, alphas, output)
        )
        self._names = _input_names(self._x, {*_RESERVED, *self._output_names()})
        like = self._steps.run(few)  # also finds the colouring, before tracing
        self._rounding = self._steps.no_rounding(like.output)

    def data(self) -> bytes:
        """Return the file's bytes."""
        with progress(4, "exporting") as step:
            try:
                return self._checked(self._graph(step))
            except Exception as error:
                name = type(self._predictor).__name__
                raise ValueError(f"{name!r} cannot be exported: {_short(error)}") from error

    def _checked(self, model: Any) -> bytes:
        """Compare the graph with the library, and return the file."""
        rounding = self._measured_rounding(model.SerializeToString())
        _make_constant(model, ROUNDING, rounding.to(self._rounding.dtype))
        if isinstance(self._steps, SetSteps):
            model.graph.output.pop()
        model.producer_name, model.producer_version = "ffcp", __version__
        needed("onnx.helper", "export", "export").set_model_props(model, self._metadata())
        data: bytes = model.SerializeToString()
        feeds = self._feeds(inputs.take(self._x, slice(0, 1)))
        checking.run(data, {n: t for n, t in feeds.items() if n != ROUNDING})
        return data

    def _graph(self, step: Callable[[], object]) -> Any:
        x = inputs.take(self._x, torch.arange(ROWS) % inputs.row_count(self._x))
        feeds = self._feeds(x)

        def function(*tensors: Tensor) -> list[Tensor]:
            named = dict(zip(feeds, tensors, strict=True))
            leaves = {key: named[name] for key, name in self._names.items()}
            return self._steps(inputs.replace(x, leaves), named)

        with rows_uncounted(self._steps.model):
            return onnx_model(function, feeds, (ROUNDING,), self._output_names(), step)

    def _feeds(self, x: Any) -> dict[str, Tensor]:
        """Return an example value of every input."""
        rows = inputs.row_count(x)
        feeds = {self._names[key]: tensor for key, tensor in inputs.leaves(x)}
        if self._labels is not None:
            feeds[GROUP] = torch.arange(rows) % len(self._labels)
        if isinstance(self._steps, SetSteps) and self._steps.takes_random:
            numbers = torch.rand(rows, generator=torch.Generator().manual_seed(0))
            feeds[RANDOM] = numbers.double()
        feeds[ROUNDING] = self._rounding
        return feeds

    def _output_names(self) -> list[str]:
        several = len(self._alphas) > 1
        ends = [f"_{_level_name(alpha)}" for alpha in self._alphas] if several else [""]
        names = ["prediction", *(f"{name}{end}" for end in ends for name in self._steps.names)]
        return [*names, "scores"] if isinstance(self._steps, SetSteps) else names

    def _measured_rounding(self, data: bytes) -> Tensor:
        """Return the rounding that the file must allow for, by comparison with the library."""
        feeds = self._feeds(self._x)
        results, predictor = checking.run(data, feeds), self._predictor
        if isinstance(self._steps, SetSteps):
            out = forward.run_batch(predictor.model, self._x, self._steps.requires)
            return checking.rounding_of_sets(results, self._steps, out, feeds.get(RANDOM))
        groups = self._labels and [self._labels[number] for number in feeds[GROUP].tolist()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FFCPWarning)  # see warn_of_infinite
            intervals = [
                predictor.predict_interval(self._x, alpha, groups=groups) for alpha in self._alphas
            ]
        return checking.rounding_of_intervals(results, intervals)

    def _metadata(self) -> dict[str, str]:
        """Return what the file says of the predictor."""
        predictor, state = self._predictor, self._state
        metadata: dict[str, Any] = {
            "ffcp": __version__,
            "method": type(predictor).__name__,
            "settings": json.dumps(predictor.comparable()),
            "points": str(len(state.calibration)),
            "fingerprint": state.fingerprint,
            "alphas": json.dumps([str(alpha) for alpha in self._alphas]),
        }
        if self._labels is not None:
            metadata["groups"] = json.dumps(self._labels)
        if getattr(predictor, "names", None):
            other = [LabelSet.OTHER] if getattr(predictor, "other_labels", False) else []
            metadata["names"] = json.dumps([*predictor.names, *other])
        columns = {
            self._names[key.replace("x", "input", 1)]: part["columns"]
            for key, part in state.layout.items()
            if "columns" in part
        }
        if columns:
            metadata["columns"] = json.dumps(columns)
        return metadata

    def warn_of_infinite(self) -> None:
        """Warn of levels at which the file returns infinite intervals, or all labels."""
        coordinates = self._state.calibration.scores.shape[1]
        for alpha, is_infinite in zip(self._alphas, self._steps.has_infinite, strict=True):
            if is_infinite:
                fewest = rows_needed(self._predictor.alpha_of_each(alpha, coordinates))
                why = f"some thresholds have fewer than {fewest} calibration rows"
                what = "intervals are infinite, or sets hold all labels"
                warn(f"at alpha={float(alpha):g} {what}: {why}")


def must_be_new_enough(version: str) -> None:
    """Raise ImportError if torch is too old for the exporter.

    >>> must_be_new_enough("2.4.1+cpu")
    Traceback (most recent call last):
    ImportError: export needs torch 2.5 or newer, this is 2.4.1+cpu: update torch
    """
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 5):
        raise ImportError(f"export needs torch 2.5 or newer, this is {version}: update torch")


def _level_name(alpha: Fraction) -> str:
    """Return a level as it appears in the names of outputs.

    >>> _level_name(Fraction(1, 20)), _level_name(Fraction(1, 3))
    ('0.05', '0.333333333333')
    """
    return f"{float(alpha):.12g}"


def _check_random(predictor: Predictor, random: float | None) -> None:
    is_randomized = getattr(predictor.calibrated().score, "randomized", False)
    if random is not None and not (is_randomized and 0 <= random < 1):
        raise ValueError(
            f"'random' must be None, or in [0, 1) for randomised prediction sets, got {random}"
        )


def _input_names(x: Any, taken: set[str]) -> dict[str, str]:
    """Return input names from the paths of their tensors: x, or x0, x1, or the keys of a dict."""
    names: dict[str, str] = {}
    for path, _ in inputs.leaves(x):
        parts = path.removeprefix("input").strip("[]").split("][")
        name = "_".join(parts)
        if not name or name[0].isdigit() or name in taken:
            name = f"x{name}"
        while name in names.values():  # x["a"]["b"] and x["a_b"]
            name = f"{name}_"
        names[path] = name
    return names


_RESERVED = {GROUP, RANDOM, ROUNDING, "prediction", "lower", "upper", "mask", "scores"}


def _make_constant(model: Any, name: str, value: Tensor) -> None:
    """Turn an input of the graph into a constant."""
    from onnx import numpy_helper

    (declared,) = [declared for declared in model.graph.input if declared.name == name]
    model.graph.input.remove(declared)
    model.graph.initializer.append(numpy_helper.from_array(value.numpy(), name))


def _short(error: BaseException) -> str:
    """Return the first lines of an error's root cause: torch's messages are pages long."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:400].rstrip(".") or type(error).__name__
