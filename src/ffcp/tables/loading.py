"""Reading the folder of a fit: all of it is checked before any of it is used."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import ffcp
from ffcp import files
from ffcp.regression.cross_conformal import CrossConformal
from ffcp.tables import fitted as fits
from ffcp.tables import seen
from ffcp.tables.columns import Columns
from ffcp.tables.errors import TableError
from ffcp.tables.fitted import BATCH, About, FittedTable
from ffcp.tables.folder import FORMAT, MANIFEST, checksum, digest
from ffcp.tables.network import Placed, Shape, TableNetwork

_FAMILY = FORMAT.rstrip("0123456789")
_REPLACED = 5  # times that a fit may be replaced while it is read


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
        for _ in range(_REPLACED):
            with suppress(FileNotFoundError):  # another fit has just taken its place
                return _load(folder)
        return _load(folder)
    except TableError:  # says all there is to say
        raise
    except FileNotFoundError as error:
        raise TableError(
            f"{folder} is damaged: {error}. Copy the whole folder, or run ffcp fit again"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise TableError(f"{folder} is damaged: {error}. Run ffcp fit again") from error


def _load(folder: Path) -> FittedTable:
    from safetensors.torch import load as from_bytes

    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        _say_another_version(folder, manifest)
        raise ValueError(f"{MANIFEST} is not of the format {FORMAT}")
    content = {name: manifest[name] for name in ("about", "columns", "shapes")}
    if not any(checksum(content, indent) == manifest["checksum"] for indent in (None, 1)):
        raise ValueError(f"{MANIFEST} was changed: its checksum is another")
    about = fits.rebuilt(content["about"])
    columns = [Columns.from_json(one) for one in content["columns"]]
    shapes: tuple[Shape, ...] = files.rebuilt(tuple[Shape, ...], content["shapes"])
    if not len(columns) == len(shapes) == max(1, about.folds):
        raise ValueError("it has not one network for each list of columns")
    data = {kind: _checked(folder, manifest["files"], kind) for kind in ("weights", "calibration")}
    try:
        tensors: dict[str, Tensor] = from_bytes(data["weights"])
    except Exception as error:  # whatever a reader of foreign bytes may stumble over
        raise ValueError(f"its weights cannot be read ({error})") from error
    rows = seen.checked(tensors.pop("seen", None))
    networks = _networks(about, columns, shapes, tensors)
    predictor = _predictor(about, networks, folder, manifest)
    return FittedTable(about, columns, networks, predictor, seen=rows)


def _say_another_version(folder: Path, manifest: Any) -> None:
    """Raise a TableError if a folder is of ffcp, but of a version that writes another format."""
    form = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(form, str) or not form.startswith(_FAMILY):
        return
    about = manifest.get("about")
    version = about.get("version") if isinstance(about, dict) else None
    which = f" ({version})" if isinstance(version, str) else ""
    raise TableError(
        f"{folder} was written by another version of ffcp{which}, in the format {form}, and "
        f"{ffcp.__version__} reads {FORMAT}: install that version, or run ffcp fit again"
    )


def _checked(folder: Path, names: Any, kind: str) -> bytes:
    name = names[kind]
    if not isinstance(name, str) or Path(name).name != name or not name.startswith(f"{kind}-"):
        raise ValueError(f"{MANIFEST} names no file of {kind}")
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"its file {name} is missing") from error
    if name != f"{kind}-{digest(data)[:32]}.safetensors":
        raise ValueError(f"{name} was changed: its checksum is another")
    return data


def _networks(
    about: About, columns: list[Columns], shapes: tuple[Shape, ...], tensors: dict[str, Tensor]
) -> list[nn.Module]:
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
        predictor: Any = CrossConformal.load(path, networks, batch_size=BATCH)
        if predictor.side != about.side:
            raise ValueError("its calibration is of another side")
        return predictor
    predictor = ffcp.load(path, networks[0])
    wanted = "predict_set" if about.classes else "predict_interval"
    if not hasattr(predictor, wanted):
        raise ValueError("its calibration is of another task")
    return predictor
