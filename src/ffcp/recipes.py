"""Recipes: how predictors and pieces were made, in plain data, so that a file can say it.

What is made by a class or function marked :func:`public` carries its recipe: the name of its maker
and the arguments. Only marked makers are ever called again, with arguments that JSON can hold;
whatever else was given (a function, a piece of the user's) is named, and must be given again.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
from torch import nn

Recipe = dict[str, Any]
Maker = TypeVar("Maker", bound=Callable[..., Any])
_MAKERS: dict[str, Callable[..., Any]] = {}


def public(maker: Maker) -> Maker:
    """Let all that this class or function makes carry its recipe.

    What a subclass makes is the subclass's own: unless that is marked too, it has no recipe.

    >>> @public
    ... class Ruler:
    ...     def __init__(self, length, unit="cm", **more):
    ...         self.length = length
    >>> recipe_of(Ruler(3, colour="red"))
    {'make': 'Ruler', 'with': {'length': 3, 'unit': 'cm', 'colour': 'red'}}
    >>> made_again(recipe_of(Ruler(3))).length
    3
    """
    make = maker.__init__ if isinstance(maker, type) else maker  # type: ignore[misc]

    def note(made: Any, *args: Any, **kwargs: Any) -> None:
        made.__dict__["_recipe"] = _recipe(maker.__name__, _arguments(make, args, kwargs))

    if isinstance(maker, type):

        @functools.wraps(make)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if type(self) is maker:
                note(self, self, *args, **kwargs)

        maker.__init__ = init  # type: ignore[misc]
        _MAKERS[maker.__name__] = maker
        return maker

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        result = make(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    _MAKERS[maker.__name__] = made
    return made  # type: ignore[return-value]


def recipe_of(made: Any) -> Recipe | None:
    """Give the recipe of something; ``None`` if its maker is not marked."""
    recipe: Recipe | None = getattr(made, "__dict__", {}).get("_recipe")
    return recipe


def maker_of(recipe: Any) -> Callable[..., Any]:
    """Find who can make something again; a ValueError if nobody is known."""
    name = recipe.get("make") if isinstance(recipe, dict) else None
    if not isinstance(name, str) or name not in _MAKERS:
        raise ValueError(f"nothing is known that makes a {name}")
    return _MAKERS[name]


def made_again(recipe: Recipe, **given: Any) -> Any:
    """Follow a recipe; what is given takes the place of what it says.

    Layers that were given as modules are found in ``model``, if that is given.
    """
    maker = maker_of(recipe)
    said = {name: value for name, value in recipe["with"].items() if name not in given}
    arguments = {name: _again(value, given.get("model")) for name, value in said.items()}
    return maker(**arguments, **given)


def left_to_you(recipe: Recipe) -> dict[str, str]:
    """Say which arguments must be given again, and what they were.

    >>> left_to_you({"make": "Bands", "with": {"scale": {"yours": "function spread"}, "seed": 0}})
    {'scale': 'function spread'}
    """
    lost = {name: ", ".join(_yours(value)) for name, value in recipe["with"].items()}
    return {name: what for name, what in lost.items() if what}


def _yours(value: Any) -> Iterator[str]:
    """Name what inside a described argument was the user's own."""
    if isinstance(value, dict) and "yours" in value:
        yield str(value["yours"])
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _yours(one)


def _arguments(make: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included; a list of them is not named."""
    signature = inspect.signature(make)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    named = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
    return named


def _recipe(name: str, given: Mapping[str, Any]) -> Recipe:
    model = given.get("model")
    said = {
        argument: value if type(value) in _PLAIN else _described(value, model)
        for argument, value in given.items()
        if argument not in ("self", "model")
    }
    return {"make": name, "with": said}


_PLAIN = {type(None), bool, int, float, str}


def _described(value: Any, model: Any) -> Any:
    """Say in plain data what an argument is, beside a model that it may be a layer of."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_described(one, model) for one in value]
    if isinstance(value, (numbers.Rational, Decimal)):
        return {"fraction": str(Fraction(value))}
    if recipe_of(value) is not None:
        return recipe_of(value)
    if isinstance(value, nn.Module) and isinstance(model, nn.Module):
        for layer, module in model.named_modules():
            if module is value:
                return {"layer": layer}
    word = getattr(value, "name", None) or getattr(value, "__qualname__", type(value).__name__)
    return {"yours": str(word)}


def _again(value: Any, model: nn.Module | None) -> Any:
    if isinstance(value, list):
        return [_again(one, model) for one in value]
    if not isinstance(value, dict):
        return value
    if "fraction" in value:
        return Fraction(value["fraction"])
    if "layer" in value and model is not None:
        return model.get_submodule(value["layer"])
    if "yours" in value:
        raise ValueError(f"{value['yours']} cannot be made again")
    return made_again(value)
