"""Config: the constructor arguments of an object, as plain data that a file can hold."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from torch import nn

_KIND, _OWN, _LAYER, _FRACTION = "class", "yours", "layer", "fraction"
_SHOWN = 6  # of a long list


class Described:
    """An object of this library that a file can describe: its class and its config."""

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments: of dataclasses, their fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}


def name_of(value: Any) -> str:
    """Return the name by which a file refers to an object of the user's.

    >>> name_of(len), name_of(3 + 1j)
    ('function len', 'complex')
    """
    if hasattr(value, "__qualname__") and callable(value):
        return f"function {value.__qualname__}"
    return str(getattr(value, "name", type(value).__qualname__))


def describe(value: Any, model: nn.Module | None = None) -> Any:
    """Return a value in plain data: an object as its class and config, a layer by its name.

    >>> describe([0.5, Fraction(1, 3), len])
    [0.5, {'fraction': '1/3'}, {'yours': 'function len'}]
    """
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [describe(one, model) for one in value]
    if isinstance(value, (numbers.Rational, Decimal)):
        return {_FRACTION: str(Fraction(value))}
    if isinstance(value, nn.Module) and not isinstance(value, Described):
        for layer, module in model.named_modules() if model is not None else ():
            if module is value:
                return {_LAYER: layer}
    config_of = getattr(type(value), "config", Described.config)
    config = {} if isinstance(value, type) else config_of(value)
    kind = {_KIND: type(value).__name__} if _is_ours(type(value)) else {_OWN: name_of(value)}
    return {**kind, **{name: describe(one, model) for name, one in config.items()}}


def build(described: Any, model: nn.Module | None = None, own: Sequence[Any] = ()) -> Any:
    """Build the object of a description; take the user's own objects from ``own``.

    Constructors check their arguments, so that a file cannot build what a caller could not.

    >>> build([0.5, {"fraction": "1/3"}, {"yours": "function len"}], own=[len])
    [0.5, Fraction(1, 3), <built-in function len>]
    """
    if isinstance(described, list):
        return [build(one, model, own) for one in described]
    if not isinstance(described, Mapping):
        return described
    if _FRACTION in described:
        return Fraction(described[_FRACTION])
    if _LAYER in described and model is not None:
        return model.get_submodule(described[_LAYER])
    if _OWN in described:
        for value in own:
            if describe(value, model) == described:
                return value
        raise ValueError(f"{shown(described)} is not in the file: give it again")
    kind = class_named(described.get(_KIND))
    config = {n: build(value, model, own) for n, value in described.items() if n != _KIND}
    if "model" in inspect.signature(kind).parameters:
        config["model"] = model
    return kind(**config)


def class_named(name: Any) -> type[Any]:
    """Return a class of this library by its name.

    >>> class_named("Nothing")
    Traceback (most recent call last):
        ...
    ValueError: unknown class 'Nothing' in the file
    """
    for kind in _subclasses(Described):
        if kind.__name__ == name and _is_ours(kind):
            return kind
    raise ValueError(f"unknown class {name!r} in the file")


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _is_ours(kind: type[Any]) -> bool:
    return issubclass(kind, Described) and kind.__module__.partition(".")[0] == "ffcp"


def own_objects(value: Any) -> Iterator[Any]:
    """Yield the user's own objects in a config: functions, and objects of foreign classes."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from own_objects(one)
    elif _is_ours(type(value)):
        yield from own_objects(list(value.config().values()))
    elif not isinstance(value, (type(None), bool, int, float, str, numbers.Number, Decimal)):
        yield value


def unsaved(described: Any) -> Iterator[str]:
    """Yield the names of the objects in a description that no file holds.

    >>> list(unsaved({"class": "IntervalPredictor", "scale": {"yours": "function f"}}))
    ['function f']
    """
    if isinstance(described, list):
        for one in described:
            yield from unsaved(one)
    elif isinstance(described, Mapping):
        if _OWN in described:
            yield str(described[_OWN])
        yield from unsaved(list(described.values()))


def differences(expected: Any, found: Any, name: str = "") -> Iterator[str]:
    """Yield the arguments in which two descriptions differ.

    >>> list(differences({"class": "Sketch", "probes": 2}, {"class": "Sketch", "probes": 1}))
    ['probes=1 (here 2)']
    """
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in dict.fromkeys([*expected, *found]):
            yield from differences(expected.get(key), found.get(key), name if key == _KIND else key)
    elif expected != found:
        yield f"{name}={_short(found)} (here {_short(expected)})"


def _short(value: Any) -> str:
    return str(value.get(_KIND, value.get(_OWN))) if isinstance(value, Mapping) else repr(value)


def is_default(value: Any) -> bool:
    """Whether a setting is one that nobody set: None, False, empty, or both sides of intervals."""
    return value is None or value is False or value in ([], "both")


def shown(described: Any) -> str:
    """Return a description as the call that makes it, without common defaults.

    Numbers have four digits, and of long lists the beginning is shown.

    >>> shown({"class": "GradientNorm", "feature": "2", "norm": None})
    "GradientNorm(feature='2')"
    >>> shown([1 / 3] * 10)
    '[0.3333, 0.3333, 0.3333, 0.3333, 0.3333, 0.3333, ... 10 in all]'
    """
    if isinstance(described, float):
        return repr(float(f"{described:.4g}"))
    if isinstance(described, list):
        rest = [f"... {len(described)} in all"] if len(described) > _SHOWN else []
        return f"[{', '.join([*map(shown, described[:_SHOWN]), *rest])}]"
    if not isinstance(described, Mapping):
        return repr(described)
    named = {n: one for n, one in described.items() if n not in (_KIND, _OWN)}
    config = {n: one for n, one in named.items() if not is_default(one)}
    listed = ", ".join(f"{name}={shown(value)}" for name, value in config.items())
    return f"{_short(described)}({listed})"
