"""Features and logits of the pretrained networks, computed once and cached.

They are stored in ``logits`` in the cache, under a name with a hash of all they depend on. Finished
chunks are stored until all are done, so that an interrupted run resumes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ffcp_paper.data import cache_files
from ffcp_paper.data.files import cache_dir
from ffcp_paper.data.images import CheckedFile, read
from ffcp_paper.ffcp_internals import run_with_norms
from ffcp_paper.networks.convnets import head_of
from ffcp_paper.networks.pretrained import NETWORKS, Inputs, VisionNetwork

CHUNK = 500  # images: what an interrupted run can lose
BATCH = 8  # images at a time: for more, memory is not reused but allocated anew
_VERSION = 2  # to be raised when the same files give other numbers

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Computed:
    """Outputs of a network on all stored images.

    Parameters
    ----------
    features
        Penultimate features, float32 [images, width]; ``None`` for SqueezeNet, whose features are
        maps (512 x 13 x 13, together 1.7 GB).
    norms
        Norm of the gradient of the most probable class's probability at the feature, [images].
    logits
        Logits, float32 [images, classes].
    labels
        True classes.
    head
        The part of the network that maps features to logits.
    """

    features: Tensor | None
    norms: Tensor
    logits: Tensor
    labels: Tensor
    head: nn.Module


def compute(network: VisionNetwork | str, progress: Progress | None = None) -> Computed:
    """Return features and logits of all stored images, from the cache if they are there.

    Parameters
    ----------
    network
        A network or its name in :data:`~ffcp_paper.networks.pretrained.NETWORKS`.
    progress
        Called with (images done, images in total) while computing, not on a cache hit.

    Examples
    --------
    >>> computed = compute("mobilenet_v2")  # doctest: +SKIP
    >>> computed.features.shape, computed.logits.shape  # doctest: +SKIP
    (torch.Size([5000, 1280]), torch.Size([5000, 1000]))
    """
    if isinstance(network, str):
        network = named(network)
    final = cached_path(network)
    chunks = final.with_suffix(".chunks")
    stored = _load(final)
    if stored is None:
        _compute_chunks(network, final, chunks, progress or (lambda done, total: None))
        stored = _load(final)
        assert stored is not None
    shutil.rmtree(chunks, ignore_errors=True)
    return Computed(
        stored.get("features"),
        stored["norms"],
        stored["logits"],
        stored["labels"],
        head_of(stored["head.weight"], stored["head.bias"]),
    )


def named(name: str) -> VisionNetwork:
    """Find a network by its name.

    >>> named("squeezenet").title
    'SqueezeNet 1.0'
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}: choose one of {', '.join(NETWORKS)}")
    return NETWORKS[name]


def cached_path(network: VisionNetwork) -> Path:
    """Return the cache path of a network's features and logits.

    The name depends on the checksums that the files should have: on a cache hit the files are
    not even opened, and need not be there.
    """
    depends = [_VERSION, network.name, repr(network.preprocess), *map(_checksum, network.files)]
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
    return cache_dir() / "logits" / f"{network.name}-{key}.safetensors"


def missing(network: VisionNetwork) -> list[CheckedFile]:
    """List the missing files that computing needs; none if the result is cached."""
    absent = [file for file in network.files if file.found is None]
    return [] if absent and _is_cached(network) else absent


def _is_cached(network: VisionNetwork) -> bool:
    # Without a known checksum a file must be read to know the name of the result.
    return all(file.sha256 for file in network.files) and cached_path(network).is_file()


def _checksum(file: CheckedFile) -> str:
    return file.sha256 or hashlib.sha256(read(file)).hexdigest()


def _compute_chunks(network: VisionNetwork, final: Path, chunks: Path, progress: Progress) -> None:
    """Compute what is missing and join it.

    Several processes may do this at once: all write the same numbers, files are written
    atomically, and a result that another process has written is used.
    """
    model, inputs = network.load(), network.inputs()
    _set_inplace(model.get_submodule("feature"))
    total = len(inputs)
    paths = []
    try:
        for start in range(0, total, CHUNK):
            stop = min(start + CHUNK, total)
            if _load(final) is not None:
                return
            path = chunks / f"{start}-{stop}.safetensors"
            if _load(path) is None:
                chunk = _run(model, inputs, start, stop, lambda done: progress(done, total))
                _write(path, chunk, chunks)
            paths.append(path)
            progress(stop, total)
        _join(paths, model, inputs, final)
    except FileNotFoundError:
        # Another process has finished and removed the chunks, maybe while one was written.
        if _load(final) is None:
            raise


def _set_inplace(model: nn.Module) -> None:
    """Run activations in place: half of the time went into allocating memory."""
    for layer in model.modules():
        if isinstance(layer, (nn.ReLU, nn.ReLU6)):
            layer.inplace = True


def _run(
    model: nn.Sequential, inputs: Inputs, start: int, stop: int, progress: Callable[[int], None]
) -> dict[str, Tensor]:
    feature, head = model.get_submodule("feature"), model.get_submodule("head")
    parts: dict[str, list[Tensor]] = {"features": [], "logits": [], "norms": []}
    for row in range(start, stop, BATCH):
        end = min(row + BATCH, stop)
        with torch.no_grad():
            features = feature(inputs.batch(row, end)).float()
        logits, norms = run_with_norms(head, features, "input", row)
        for name, part in (("features", features), ("logits", logits), ("norms", norms)):
            parts[name].append(part)
        if end < stop:  # the last batch is reported when the chunk is on disk
            progress(end)
    if parts["features"][0].dim() > 2:
        del parts["features"]  # maps are too large to keep
    return {name: torch.cat(result) for name, result in parts.items()}


def _join(paths: list[Path], model: nn.Sequential, inputs: Inputs, final: Path) -> None:
    parts = [_load(path) for path in paths]
    result = [part for part in parts if part is not None]
    if len(result) < len(parts):
        raise FileNotFoundError(f"chunks were removed from {paths[0].parent}: compute again")
    joined = {name: torch.cat([part[name] for part in result]) for name in result[0]}
    state = model.get_submodule("head").state_dict()
    head = {f"head.{name.split('.')[-1]}": value for name, value in state.items()}
    _write(final, {**joined, **head, "labels": inputs.labels}, paths[0].parent)


def _write(path: Path, tensors: Mapping[str, Tensor], scratch: Path) -> None:
    """Write tensors to a file atomically.

    The temporary file is in ``scratch``, which is removed in the end with what killed runs left.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=scratch, suffix=".tmp")
    os.close(handle)
    try:
        with open(temporary, "wb") as file:
            file.write(cache_files.pack(tensors))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _load(path: Path) -> dict[str, Tensor] | None:
    """Return a cached file; ``None`` if it is absent or damaged."""
    try:
        return cache_files.unpack(path.read_bytes())[0]
    except FileNotFoundError:
        pass
    except ValueError as error:
        cache_files.warn_damaged(path, error)
    return None
