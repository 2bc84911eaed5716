"""Hand an input to a model in the way it takes that, and say in words what is wrong with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ffcp.network import arrays, inputs
from ffcp.network.model_output import whole


def call(model: nn.Module, x: Any) -> Any:
    """Call a model on an input, in the way it takes that; say what is wrong with one row."""
    try:
        return _caller(model, x)(x)
    except (RuntimeError, IndexError) as error:
        if isinstance(x, Tensor) and x.dim() == 1 and not isinstance(error, MemoryError):
            raise ValueError(
                f"the model cannot take x of shape {tuple(x.shape)} ({error}). A single row is "
                "written x[None], rows of one number each x[:, None]"
            ) from error
        advice = _advice_on_types(model, x, str(error))
        if advice:
            raise ValueError(f"the model cannot take this x ({error}): {advice}") from error
        raise
    except AssertionError as error:
        if "Guard failed" not in str(error):
            raise
        raise ValueError(
            f"the exported model does not take {inputs.row_count(x)} rows of this shape ({error}): "
            "export it for any number of rows (dynamic_shapes, with torch.export.Dim('rows') for "
            "dimension 0), or set batch_size= to what it takes"
        ) from error


def _advice_on_types(model: nn.Module, x: Any, said: str) -> str:
    """Say which tensors of an input to convert, if their types are what torch complains of."""
    is_index = "'indices'" in said  # of an embedding
    if not is_index and not any(words in said for words in _OF_TYPES):
        return ""
    wrong = {
        key: tensor.dtype
        for key, tensor in inputs.leaves(x, "x")
        if tensor.is_floating_point() == is_index
    }
    if not wrong:
        return ""
    _, dtype = arrays.device_and_dtype(model)
    why = f"the model computes in {dtype}, and tensors of whole numbers stay so, for embeddings"
    why = "an embedding takes whole numbers" if is_index else why
    named = " and ".join(f"{key} is {kind}" for key, kind in wrong.items())
    gives = " or ".join(f"{key}.{'long()' if is_index else f'to({dtype})'}" for key in wrong)
    return f"{named}; {why}. Give {gives}"


_OF_TYPES = ("dtype", "datatype", "scalar type", "Input type", "not implemented for")


def _caller(model: nn.Module, x: Any) -> Callable[[Any], Any]:
    """Find how the model takes this kind of input: spread over its arguments, or as one.

    A tuple is spread over positional and a dict over keyword arguments if ``forward`` can
    take them so; otherwise the whole object is its one argument. A dict with some keys that are
    arguments and some that are not is refused, naming them.
    """
    if isinstance(x, Tensor):
        return model
    if isinstance(x, Mapping):
        if _binds(model, **x):
            return lambda batch: model(**batch)
        return lambda batch: _with_dict(model, batch)
    if isinstance(x, (tuple, list)) and _binds(model, *x):
        return lambda batch: model(*batch)
    return model


def _with_dict(model: nn.Module, x: Mapping[str, Any]) -> Any:
    """Hand a dict over as one argument, if that can be meant."""
    kinds = inspect.Parameter
    try:
        parameters = inspect.signature(whole(model).forward).parameters
    except (TypeError, ValueError):
        return model(x)
    kind = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    named = {name: p for name, p in parameters.items() if p.kind in kind}
    unknown = [key for key in x if key not in named]
    missing = [n for n, p in named.items() if p.default is kinds.empty and n not in x]
    wrong = [f"does not take {', '.join(map(repr, unknown))}"] if unknown else []
    wrong += [f"needs {', '.join(map(repr, missing))}"] if missing else []
    message = (
        f"the model's forward takes the arguments {', '.join(named)}: it {' and '.join(wrong)}. "
        f"x has the keys {', '.join(map(str, x))}"
    )
    if len(named) > 1 and (len(unknown) < len(x) or not _binds(model, x)):
        raise TypeError(message)
    try:
        return model(x)
    except (TypeError, AttributeError) as error:
        if len(unknown) == len(x):
            raise
        raise TypeError(message) from error  # one argument, and a key of its name


def _binds(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(whole(model).forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True
