"""The folder of a fit: weights and calibration in safetensors, all else in JSON, and a page.

``ffcp.json`` names the other files by their checksums and is written last, in one step: a fit
that is killed leaves what was there before, and a second one that replaces it is seen whole or
not at all. Nothing is pickled, and loading checks everything.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import ffcp
from ffcp import files
from ffcp.regression.cross import CrossBands
from ffcp.tables import fitted as fits
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.fitted import BATCH, About, FittedTable
from ffcp.tables.network import Placed, Shape, TableNetwork

MANIFEST, REPORT = "ffcp.json", "report.html"
_FORMAT = "ffcp-table-1"
_OURS = ("weights-", "calibration-")


def must_be_free(folder: str | Path, *, force: bool) -> None:
    """Refuse a folder that holds a fit, unless ``force``, and one that is not ours, always."""
    folder = Path(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise TableError(f"{folder} is a file: give the name of a folder that is not there yet")
    names = [file.name for file in folder.iterdir() if not file.name.startswith(".")]
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        raise TableError(f"{folder} holds other things ({foreign[0]}): give another folder")
    if MANIFEST in names and not force:
        raise TableError(f"{folder} holds a fit already: --force replaces it, --out names another")


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, REPORT) or name.startswith(_OURS)


def save(fitted: FittedTable, folder: str | Path, *, force: bool = False) -> Path:
    """Write a fit to a folder."""
    folder = Path(folder)
    must_be_free(folder, force=force)
    folder.mkdir(parents=True, exist_ok=True)
    from safetensors.torch import save as as_bytes

    weights = {
        f"{number}.{name}": tensor.contiguous().clone()
        for number, network in enumerate(fitted.networks)
        for name, tensor in network.state_dict().items()
    }
    names = {"weights": _put(folder, "weights", as_bytes(weights))}
    scratch = folder / f".calibration.{names['weights'][8:24]}"
    try:
        fitted.predictor.save(scratch)
        names["calibration"] = _put(folder, "calibration", scratch.read_bytes())
    finally:
        scratch.unlink(missing_ok=True)
    if fitted.report is not None:
        files.put(folder / REPORT, fitted.report.encode())
    content = {
        "about": asdict(fitted.about),
        "columns": [columns.to_json() for columns in fitted.columns],
        "shapes": [asdict(_network(one).shape) for one in fitted.networks],
    }
    sealed = json.dumps(content, indent=1, allow_nan=False)
    manifest = {"format": _FORMAT, "files": names, "checksum": _digest(sealed.encode()), **content}
    files.put(folder / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
    for file in folder.iterdir():  # those of the fit that was replaced
        if file.name.startswith(_OURS) and file.name not in names.values():
            file.unlink(missing_ok=True)
    return folder


def _network(model: nn.Module) -> TableNetwork:
    network = model.network if isinstance(model, Placed) else model
    assert isinstance(network, TableNetwork)
    return network


def _put(folder: Path, kind: str, data: bytes) -> str:
    name = f"{kind}-{_digest(data)[:32]}.safetensors"
    files.put(folder / name, data)
    return name


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load(folder: str | Path) -> FittedTable:
    """Read the folder of a fit; what is damaged or foreign is a TableError.

    Examples
    --------
    >>> load("nowhere.ffcp")
    Traceback (most recent call last):
    ffcp.tables.errors.TableError: there is no folder nowhere.ffcp: ffcp fit makes one
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TableError(f"there is no folder {folder}: ffcp fit makes one")
    if not (folder / MANIFEST).is_file():
        raise TableError(f"{folder} holds no finished fit ({MANIFEST} is missing): run ffcp fit")
    try:
        try:
            return _load(folder)
        except FileNotFoundError:  # another fit has just taken its place
            return _load(folder)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise TableError(f"{folder} is damaged: {error}. Run ffcp fit again") from error


def _load(folder: Path) -> FittedTable:
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"{MANIFEST} is not of the format {_FORMAT}")
    content = {name: manifest[name] for name in ("about", "columns", "shapes")}
    if _digest(json.dumps(content, indent=1).encode()) != manifest["checksum"]:
        raise ValueError(f"{MANIFEST} was changed: its checksum is another")
    about = fits.rebuilt(content["about"])
    columns = [Columns.from_json(one) for one in content["columns"]]
    shapes: tuple[Shape, ...] = files.rebuilt(tuple[Shape, ...], content["shapes"])
    if not len(columns) == len(shapes) == max(1, about.folds):
        raise ValueError("it has not one network for each list of columns")
    data = {kind: _checked(folder, manifest["files"], kind) for kind in ("weights", "calibration")}
    networks = _networks(about, columns, shapes, data["weights"])
    return FittedTable(about, columns, networks, _predictor(about, networks, folder, manifest))


def _checked(folder: Path, names: Any, kind: str) -> bytes:
    name = names[kind]
    if not isinstance(name, str) or Path(name).name != name or not name.startswith(f"{kind}-"):
        raise ValueError(f"{MANIFEST} names no file of {kind}")
    data = (folder / name).read_bytes()
    if name != f"{kind}-{_digest(data)[:32]}.safetensors":
        raise ValueError(f"{name} was changed: its checksum is another")
    return data


def _networks(
    about: About, columns: list[Columns], shapes: tuple[Shape, ...], data: bytes
) -> list[nn.Module]:
    from safetensors.torch import load as from_bytes

    tensors: dict[str, Tensor] = from_bytes(data)
    networks: list[nn.Module] = []
    start = 0
    for number, (own, shape) in enumerate(zip(columns, shapes, strict=True)):
        outputs = max(1, len(about.classes))
        if (shape.numbers, shape.flags, shape.outputs) != (own.numbers, own.flags, outputs):
            raise ValueError("a network has not the sizes of its columns")
        mine = {
            name[len(f"{number}.") :]: tensor
            for name, tensor in tensors.items()
            if name.startswith(f"{number}.")
        }
        units = mine.pop("units") if about.folds else None
        inner = {name.removeprefix("network."): tensor for name, tensor in mine.items()}
        network = TableNetwork.from_weights(shape, inner)
        if units is None:
            networks.append(network)
            continue
        if units.shape != (2,) or not bool(units.isfinite().all()) or not units[1] > 0:
            raise ValueError("a network has units that are none")
        networks.append(Placed(network, start, float(units[0]), float(units[1])).eval())
        start += own.numbers + own.flags
    return networks


def _predictor(about: About, networks: list[nn.Module], folder: Path, manifest: Any) -> Any:
    path = folder / manifest["files"]["calibration"]
    if about.folds:
        predictor: Any = CrossBands.load(path, networks, batch_size=BATCH)
        if predictor.side != about.side:
            raise ValueError("its calibration is of another side")
        return predictor
    predictor = ffcp.load(path, networks[0])
    wanted = "predict_set" if about.classes else "predict_interval"
    if not hasattr(predictor, wanted):
        raise ValueError("its calibration is of another task")
    return predictor


__all__ = ["MANIFEST", "REPORT", "load", "must_be_free", "save"]
