"""Pick the prediction from what a model returns: a tuple, a dict, a ModelOutput."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ffcp.description import name_of

Output = str | int | Callable[[Any], Tensor] | None


class Picking(nn.Module):
    """A model that returns one of the tensors that another one returns.

    It shares the layers and weights of the other, under the same names.

    Parameters
    ----------
    model : nn.Module
        The model.
    output : str, int or callable
        A key or attribute, an index, or a function of what the model returns.

    Examples
    --------
    >>> import torch
    >>> lstm = nn.LSTM(2, 3, batch_first=True)
    >>> Picking(lstm, 0)(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5, 3])
    >>> [name for name, _ in Picking(nn.Sequential(nn.Linear(1, 1)), 0).named_modules()]
    ['', '0']
    """

    def __init__(self, model: nn.Module, output: str | int | Callable[[Any], Tensor]) -> None:
        super().__init__()
        # In a tuple, so that the model is not registered as a submodule.
        self.__dict__["_picked"] = (model, output)
        for kept in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[kept] = getattr(model, kept)

    @property
    def whole(self) -> nn.Module:
        """The model itself."""
        model: nn.Module = self.__dict__["_picked"][0]
        return model

    @property
    def training(self) -> bool:
        """The mode of the model."""
        return "_picked" in self.__dict__ and self.whole.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_picked" in self.__dict__:
            self.whole.training = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model and pick."""
        model, output = self.__dict__["_picked"]
        return pick(model(*args, **kwargs), output)

    def extra_repr(self) -> str:
        """Show the model's own settings, and ``output``."""
        model, output = self.__dict__["_picked"]
        name = output if isinstance(output, (str, int)) else name_of(output)
        return f"{type(model).__name__}({model.extra_repr()}), output={name!r}"


def picking(model: nn.Module, output: Output) -> nn.Module:
    """Return a model that returns the picked tensor; the model itself for ``output=None``."""
    if output is None or not isinstance(model, nn.Module):
        return model
    if isinstance(output, bool) or not (isinstance(output, (str, int)) or callable(output)):
        raise TypeError(
            "output picks the prediction from what the model returns: a key, an index or a "
            f"function, got {output!r}"
        )
    return Picking(model, output)


def whole(model: nn.Module) -> nn.Module:
    """Return the model inside a :class:`Picking`; any other model as it is."""
    return model.whole if isinstance(model, Picking) else model


def takes_arguments(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the model's forward can be called with these arguments; False if unknown."""
    try:
        inspect.signature(whole(model).forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def pick(returned: Any, output: str | int | Callable[[Any], Any]) -> Any:
    """Return one tensor of a model's output.

    >>> pick({"logits": 1, "hidden": 2}, "logits"), pick((3, 4), -1), pick([5], lambda r: r[0])
    (1, 4, 5)
    """
    if callable(output):
        return output(returned)
    if isinstance(returned, Tensor):
        raise TypeError(
            f"the model returns a tensor, so there is nothing to pick by output={output!r}: leave "
            "it out, or take a column by output=lambda out: out[:, 0]"
        )
    try:
        if isinstance(output, str) and not isinstance(returned, Mapping):
            return getattr(returned, output)
        if isinstance(output, int) and isinstance(returned, Mapping) and output not in returned:
            return list(returned.values())[output]
        return returned[output]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TypeError(f"the model returns {described(returned)}: no {output!r} in it") from error


def described(returned: Any) -> str:
    """Describe a model's output: its type, and its keys, fields or length."""
    kind = type(returned).__name__
    if isinstance(returned, Mapping):
        return f"a {kind} with keys {list(returned)}"
    if isinstance(returned, tuple) and hasattr(returned, "_fields"):
        return f"a {kind} with fields {list(returned._fields)}"
    if isinstance(returned, (tuple, list)):
        return f"a {kind} of length {len(returned)}"
    return f"a {kind}"
