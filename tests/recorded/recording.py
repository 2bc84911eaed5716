"""The registry of cases, how their results are written to JSON, and how they are compared."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ffcp
from tests.pinned import pinned

TOLERANCE = 1e-10  # relative and absolute, of floating-point numbers
HERE = Path(__file__).parent
VALUES, VALUES_CHANGED = HERE / "values", HERE / "values_changed"

Values = dict[str, Any]
CASES: dict[str, Callable[[], Values]] = {}
FAMILIES: dict[str, str] = {}  # of each case: the file that holds its values


def case(family: str, name: str) -> Callable[[Callable[[], Values]], Callable[[], Values]]:
    """Register a case: a function without arguments that returns a flat dict of values."""

    def register(function: Callable[[], Values]) -> Callable[[], Values]:
        if name in CASES:
            raise ValueError(f"there are two cases {name!r}")
        CASES[name], FAMILIES[name] = function, family
        return function

    return register


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the names of the library's warnings; elsewhere each of them is an error."""
    names: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ffcp.FFCPWarning)
        yield names
        names += [w.category.__name__ for w in caught if issubclass(w.category, ffcp.FFCPWarning)]


# -- to and from JSON --------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """Turn a value into what JSON can hold; floats keep all their digits.

    >>> encode(torch.tensor([[True, False]]))
    {'shape': [1, 2], 'bool': '10'}
    >>> encode(torch.tensor([1.5]))
    {'shape': [1], 'float32': [1.5]}
    """
    if isinstance(value, Tensor):
        kind, flat = str(value.dtype).removeprefix("torch."), value.detach().flatten().tolist()
        stored = "".join(str(int(v)) for v in flat) if value.dtype == torch.bool else flat
        return {"shape": list(value.shape), kind: stored}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value)
    raise TypeError(f"a case returned a {type(value).__name__}")


def run(name: str) -> Values:
    """Run a case and return its values as JSON holds them."""
    with pinned(), warnings.catch_warnings():
        # Cases ask for any level, as nothing was said of large ones when they were recorded.
        warnings.filterwarnings("ignore", r".*alpha=0\.[5-9]", ffcp.FFCPWarning)
        return {key: encode(value) for key, value in CASES[name]().items()}


def read(folder: Path) -> dict[str, Values]:
    """Read the recorded values of all cases, by name."""
    found: dict[str, Values] = {}
    for path in sorted(folder.glob("*.json")):
        found.update(json.loads(path.read_text()))
    return found


def write(folder: Path, values: Mapping[str, Values]) -> None:
    """Write the values of cases, one file for each family and one line for each value."""
    folder.mkdir(exist_ok=True)
    families: dict[str, dict[str, Values]] = {}
    for name, found in values.items():
        families.setdefault(FAMILIES[name], {})[name] = found
    for family, cases in families.items():
        parts = [
            f"{json.dumps(name)}: {{\n"
            + ",\n".join(f"{json.dumps(k)}: {_line(v)}" for k, v in found.items())
            + "\n}"
            for name, found in sorted(cases.items())
        ]
        (folder / f"{family}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# -- comparing ---------------------------------------------------------------------------------


def differences(
    found: Mapping[str, Any], recorded: Mapping[str, Any], tolerance: float = TOLERANCE
) -> list[str]:
    """Say where two results differ: floats beyond the tolerance, all else at all.

    >>> differences({"a": 1.0, "b": 2}, {"a": 1.0 + 1e-12, "b": 3})
    ['b: 2, recorded 3']
    """
    missing = [f"{key}: not given any more" for key in recorded if key not in found]
    new = [f"{key}: not recorded" for key in found if key not in recorded]
    lines = missing + new
    for key, value in found.items():
        if key in recorded:
            lines += _different(key, value, recorded[key], tolerance)
    return lines


def _different(key: str, found: Any, recorded: Any, tolerance: float) -> Iterator[str]:
    if isinstance(found, float) and isinstance(recorded, float):
        if not _close(found, recorded, tolerance):
            yield f"{key}: {found!r}, recorded {recorded!r}"
    elif type(found) is not type(recorded):
        yield f"{key}: {found!r}, recorded {recorded!r}"
    elif isinstance(found, list) and len(found) == len(recorded):
        for index, (one, other) in enumerate(zip(found, recorded, strict=True)):
            yield from _different(f"{key}[{index}]", one, other, tolerance)
    elif isinstance(found, dict) and found.keys() == recorded.keys():
        for part in found:
            if part == "shape":
                # Intervals had the shape of the model's output when they were recorded, (n, 1),
                # and have that of the targets now, (n,): an axis of length 1 says nothing.
                if _long_axes(found[part]) != _long_axes(recorded[part]):
                    yield f"{key} shape: {found[part]}, recorded {recorded[part]}"
                continue
            yield from _different(f"{key} {part}", found[part], recorded[part], tolerance)
    elif found != recorded:
        yield f"{key}: {found!r}, recorded {recorded!r}"


def _long_axes(shape: list[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _close(found: float, recorded: float, tolerance: float) -> bool:
    if math.isnan(found) or math.isnan(recorded):
        return math.isnan(found) and math.isnan(recorded)
    if math.isinf(found) or math.isinf(recorded):
        return found == recorded
    return abs(found - recorded) <= tolerance * (1 + abs(recorded))
