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

_CLASS, _YOURS, _LAYER, _FRACTION = "class", "yours", "layer", "fraction"
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
        return [describe(item, model) for item in value]
    if isinstance(value, (numbers.Rational, Decimal)):
        return {_FRACTION: str(Fraction(value))}
    if isinstance(value, nn.Module) and not isinstance(value, Described):
        for layer, module in model.named_modules() if model is not None else ():
            if module is value:
                return {_LAYER: layer}
    config_of = getattr(type(value), "config", Described.config)
    config = {} if isinstance(value, type) else config_of(value)
    owner = {_CLASS: type(value).__name__} if _is_ours(type(value)) else {_YOURS: name_of(value)}
    return {**owner, **{name: describe(argument, model) for name, argument in config.items()}}


def build(described: Any, model: nn.Module | None = None, users: Sequence[Any] = ()) -> Any:
    """Build the object of a description; take objects of the user's from ``users``.

    Constructors check their arguments, so that a file cannot build what a caller could not.

    >>> build([0.5, {"fraction": "1/3"}, {"yours": "function len"}], users=[len])
    [0.5, Fraction(1, 3), <built-in function len>]
    """
    if isinstance(described, list):
        return [build(item, model, users) for item in described]
    if not isinstance(described, Mapping):
        return described
    if _FRACTION in described:
        return Fraction(described[_FRACTION])
    if _LAYER in described and model is not None:
        return model.get_submodule(described[_LAYER])
    if _YOURS in described:
        for value in users:
            if describe(value, model) == described:
                return value
        raise ValueError(f"{shown(described)} is not in the file: give it again")
    maker = class_named(described.get(_CLASS))
    config = {n: build(value, model, users) for n, value in described.items() if n != _CLASS}
    if "model" in inspect.signature(maker).parameters:
        config["model"] = model
    return maker(**config)


def class_named(name: Any) -> type[Any]:
    """Return a class of this library by its name.

    >>> class_named("Nothing")
    Traceback (most recent call last):
        ...
    ValueError: unknown class 'Nothing' in the file
    """
    for subclass in _subclasses(Described):
        if subclass.__name__ == name and _is_ours(subclass):
            return subclass
    raise ValueError(f"unknown class {name!r} in the file")


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _is_ours(cls: type[Any]) -> bool:
    return issubclass(cls, Described) and cls.__module__.partition(".")[0] == "ffcp"


def own_objects(value: Any) -> Iterator[Any]:
    """Yield the user's own objects in a config: functions, and objects of foreign classes."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from own_objects(item)
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
        for item in described:
            yield from unsaved(item)
    elif isinstance(described, Mapping):
        if _YOURS in described:
            yield str(described[_YOURS])
        yield from unsaved(list(described.values()))


def differences(expected: Any, actual: Any, name: str = "") -> Iterator[str]:
    """Yield the arguments in which two descriptions differ.

    >>> list(differences({"class": "Sketch", "probes": 2}, {"class": "Sketch", "probes": 1}))
    ['probes=1 (here 2)']
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key in dict.fromkeys([*expected, *actual]):
            inner = name if key == _CLASS else key
            yield from differences(expected.get(key), actual.get(key), inner)
    elif expected != actual:
        yield f"{name}={_short(actual)} (here {_short(expected)})"


def _short(value: Any) -> str:
    return str(value.get(_CLASS, value.get(_YOURS))) if isinstance(value, Mapping) else repr(value)


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
    arguments = ", ".join(
        f"{name}={shown(value)}"
        for name, value in described.items()
        if name not in (_CLASS, _YOURS) and not is_default(value)
    )
    return f"{_short(described)}({arguments})"
