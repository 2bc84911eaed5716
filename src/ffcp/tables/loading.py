"""Reading of the folder of a fit; everything is checked before it is used."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ffcp
from ffcp import files
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.fitted import BATCH, About, FittedTable
from ffcp.tables.folder import FORMAT, MANIFEST, checksum, digest
from ffcp.tables.network import Placed, Shape, TableNetwork
from ffcp.tables.trees import TargetTrees

_REPLACED = 5  # retries if the fit is replaced while it is read


def load(folder: str | Path) -> FittedTable:
    """Return the fit in a folder; raise TableError if it is damaged or something else.

    Parameters
    ----------
    folder : str or Path
        The folder that ``ffcp fit`` or :meth:`FittedTable.save` wrote.

    Examples
    --------
    >>> load("nowhere.ffcp")
    Traceback (most recent call last):
    ffcp.tables.errors.TableError: there is no fit in nowhere.ffcp (no ffcp.json): write one by ...
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise TableError(f"there is no fit in {folder} (no {MANIFEST}): write one by ffcp fit")
    try:
        for _ in range(_REPLACED):
            with suppress(FileNotFoundError):  # it was replaced by another fit
                return _load(folder)
        return _load(folder)
    except TableError:  # its message is complete
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise TableError(f"{folder} is damaged: {error}. Copy it or run ffcp fit again") from error


def _load(folder: Path) -> FittedTable:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if (form := manifest["format"]) != FORMAT:
        raise TableError(f"{folder} has format {form!r}, expected {FORMAT!r}: run ffcp fit again")
    content = {name: manifest[name] for name in ("about", "columns", "shapes")}
    if checksum(content) != manifest["checksum"]:
        raise ValueError(f"{MANIFEST} was changed: its checksum differs")
    about: About = files.rebuilt(About, content["about"])
    columns = [Columns.from_json(saved) for saved in content["columns"]]
    shapes: tuple[Shape, ...] = files.rebuilt(tuple[Shape, ...], content["shapes"])
    if len(columns) != max(1, about.folds):
        raise ValueError("expected one list of columns for each network")
    data = {kind: _checked(folder, manifest["files"], kind) for kind in ("weights", "calibration")}
    networks, rows = _networks(about, columns, shapes, data["weights"])
    path = folder / manifest["files"]["calibration"]
    predictor: Any
    if about.folds:
        predictor = CrossConformal.load(path, networks, batch_size=BATCH)
    else:
        predictor = ffcp.load(path, networks[0])
    if not hasattr(predictor, "predict_set" if about.classes else "predict_interval"):
        raise ValueError("'calibration' is of another task")
    return FittedTable(about, columns, networks, predictor, rows)


def _checked(folder: Path, names: Any, kind: str) -> bytes:
    """Return the bytes of a file of the fit, whose name holds its checksum."""
    name = names[kind]
    if not isinstance(name, str) or Path(name).name != name or not name.startswith(f"{kind}-"):
        raise ValueError(f"{MANIFEST} does not name a file of {kind!r}")
    data = (folder / name).read_bytes()
    if name != f"{kind}-{digest(data)[:32]}.safetensors":
        raise ValueError(f"{name} was changed: its checksum differs")
    return data


def _networks(
    about: About, columns: list[Columns], shapes: tuple[Shape, ...], data: bytes
) -> tuple[list[nn.Module], Tensor]:
    """Return the networks, and the hashes of training and calibration rows."""
    from safetensors.torch import load as from_bytes

    networks = nn.ModuleList()
    start, outputs = 0, max(1, len(about.classes))
    for inputs, shape in zip(columns, shapes, strict=True):
        if (shape.numbers, shape.flags, shape.outputs) != (inputs.numbers, inputs.flags, outputs):
            raise ValueError("the 'shapes' of the networks do not match the columns")
        network = TableNetwork.of_shape(shape)
        networks.append(Placed(network, start, 0.0, 1.0) if about.folds else network)
        start += inputs.numbers + inputs.flags
    try:
        tensors: dict[str, Tensor] = from_bytes(data)
        rows = tensors.pop("seen")
        networks.load_state_dict(tensors)
    except Exception as error:  # reading foreign bytes may raise anything
        raise ValueError(f"the weights cannot be read ({error})") from error
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ValueError("the weights are not finite")
    for module in networks.modules():
        if isinstance(module, TargetTrees):
            module.check()
    if rows.dtype != torch.int64 or rows.dim() != 1 or not bool((rows.diff() > 0).all()):
        raise ValueError("expected ascending int64 hashes of rows")
    return list(networks.eval()), rows
