"""Training of segmentation networks, with checkpoints to resume from."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ffcp import FFCPWarning
from ffcp.segmentation import targets
from ffcp_paper.data import cache_files, label_maps, result_cache
from ffcp_paper.data.label_maps import LabelledImages
from ffcp_paper.ffcp_internals import fingerprint
from ffcp_paper.networks import segmentation_nets

_FORMAT = "ffcp-training-1"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Augment:
    """Data augmentation: crop, resize, mirror, change of contrast and brightness.

    Parameters
    ----------
    smallest
        A window of this share of both sides, at least, is cut out of an image.
    size
        The window is resized to this share of the sides: the network sees images of this size.
    light
        Largest change of contrast (as a factor) and of brightness (as a share of the range).

    Examples
    --------
    >>> data = label_maps.shapes(3)
    >>> x, labels = Augment()(data.pixels, data.labels, torch.Generator().manual_seed(0))
    >>> x.shape, labels.shape
    (torch.Size([3, 3, 64, 96]), torch.Size([3, 32, 48]))
    """

    smallest: float = 0.75
    size: float = 1.0
    light: float = 0.1

    def __call__(
        self, pixels: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return a network's inputs and the labels of a batch, each image varied."""
        if any(side % part for side, part in zip(pixels.shape[2:], labels.shape[1:], strict=True)):
            raise ValueError(
                f"images of {tuple(pixels.shape[2:])} pixels cannot be cut along with labels of "
                f"{tuple(labels.shape[1:])}: their sides must be multiples"
            )
        pairs = [self._one(*pair, generator) for pair in zip(pixels, labels, strict=True)]
        images, maps = zip(*pairs, strict=True)
        return torch.stack(images), torch.stack(maps)

    def _one(
        self, pixels: Tensor, labels: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        share, top, left, mirror, contrast, brightness = torch.rand(6, generator=generator).tolist()
        height, width = labels.shape
        size = (round(self.size * height), round(self.size * width))
        share = self.smallest + (1 - self.smallest) * share
        pixels, labels = _window(pixels, labels, share, top, left)
        image, labels = _resized(label_maps.normalised(pixels), labels, size)
        if mirror < 0.5:
            image, labels = image.flip(2), labels.flip(1)
        factor = 1 + self.light * (2 * contrast - 1)
        shift = 4 * self.light * (2 * brightness - 1)  # the inputs span 4
        return image * factor + shift, labels


def _window(
    pixels: Tensor, labels: Tensor, share: float, top: float, left: float
) -> tuple[Tensor, Tensor]:
    """Cut a window out of an image and its labels, of a share of the sides."""
    height, width = labels.shape
    # It starts and ends between two labels, so that both are cut at the same place.
    rows, columns = round(share * height), round(share * width)
    y, x = int(top * (height - rows + 1)), int(left * (width - columns + 1))
    down, across = pixels.shape[1] // height, pixels.shape[2] // width  # pixels of a label
    inside = pixels[:, y * down : (y + rows) * down, x * across : (x + columns) * across]
    return inside, labels[y : y + rows, x : x + columns]


def _resized(image: Tensor, labels: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Resize labels to a size, and their image along with them."""
    if labels.shape == size:
        return image, labels
    down, across = image.shape[1] // labels.shape[0], image.shape[2] // labels.shape[1]
    image = functional.interpolate(
        image[None], (size[0] * down, size[1] * across), mode="bilinear", align_corners=False,
        antialias=True,
    )[0]  # fmt: skip
    return image, functional.interpolate(labels[None, None], size, mode="nearest-exact")[0, 0]


def blurred_shares(labels: Tensor, data: LabelledImages) -> Tensor:
    """Return the share of each class near a pixel, from which targets are computed.

    Pixels without a label have no shares.

    >>> data = label_maps.shapes(2, size=(16, 24))
    >>> blurred_shares(data.labels, data).sum(dim=1).round(decimals=4).unique()
    tensor([1.])
    """
    numbers = targets(labels, data.classes, ignore=data.ignore, smallest=1e-6)
    return numbers.exp().neg().exp().nan_to_num(nan=0.0)


def weighted_loss(logits: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """Return the cross entropy of labelled pixels, each class times its weight, on average.

    The weights of one batch need not be 1 on average: a batch without rare classes counts less.

    >>> shares = torch.tensor([[[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]]])  # the last has no label
    >>> loss = weighted_loss(torch.zeros(1, 2, 1, 3), shares, torch.tensor([1.0, 3.0]))
    >>> round(float(loss / math.log(2)), 4)
    2.0
    """
    loss = functional.cross_entropy(logits, shares, weights, reduction="sum")
    return loss / shares.sum().clamp_min(1)


def masked_mse(scores: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error over the targets that are not NaN.

    >>> float(masked_mse(torch.tensor([1.0, 5.0]), torch.tensor([3.0, math.nan])))
    4.0
    """
    known = ~wanted.isnan()
    # The NaN must not reach the difference: its gradient would be NaN although it is masked.
    error = (scores - wanted.where(known, 0)).square() * known
    return error.sum() / known.sum().clamp_min(1)


def class_weights(data: LabelledImages, balance: float) -> Tensor:
    """Return class weights that let rare classes count more; 1 for the average pixel.

    Parameters
    ----------
    data
        LabelledImages with label maps.
    balance
        The weight of a class is its share of the pixels to the power of minus ``balance``: with 0
        all pixels count the same, with 1 all classes.

    Returns
    -------
    Tensor
        A weight for each class; classes that never occur have 0.

    Examples
    --------
    >>> pixels, maps = torch.zeros(1, 3, 1, 4).byte(), torch.tensor([[[0, 0, 0, 1]]]).byte()
    >>> class_weights(LabelledImages("few", ("common", "rare"), None, pixels, maps), balance=1.0)
    tensor([0.6667, 2.0000])
    """
    labels = data.labels.flatten()
    known = labels if data.ignore is None else labels[labels != data.ignore]
    counts = torch.bincount(known.long(), minlength=data.classes).double()
    share = counts / counts.sum()
    weights = torch.where(share > 0, share.clamp_min(1e-12) ** -balance, 0.0)
    return (weights / (share * weights).sum()).float()


def one_cycle(step: int, steps: int, warm: float = 0.1) -> float:
    """Return the learning rate at a step as a share of the largest: up in a line, down a cosine.

    >>> [round(one_cycle(step, 100), 3) for step in (0, 5, 10, 55, 99)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    rising = max(1, round(warm * steps))
    if step < rising:
        return step / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def fit(
    model: nn.Sequential,
    data: LabelledImages,
    *,
    epochs: int,
    seed: int = 0,
    batch_size: int = 8,
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-3,
    balance: float | None = None,
    augment: Augment | None = None,
    checkpoint: Path | None = None,
    progress: Progress = lambda message: None,
) -> nn.Sequential:
    """Fit a network to the numbers that :func:`ffcp.segmentation.targets` makes of label maps.

    The loss is the mean squared error over labelled pixels, or, with ``balance``, the cross entropy
    of what the numbers are the logs of. AdamW, with a learning rate that rises for a tenth of the
    steps and then falls to zero. An epoch depends on the weights, ``seed`` and its number alone, so
    a resumed run ends with the same weights as an uninterrupted one.

    Parameters
    ----------
    model
        The network, whose head ends in :class:`ffcp.segmentation.DoubleLog`; it is trained in place
        and left in eval mode.
    data
        Images and label maps, these of the size of the output.
    epochs
        Number of epochs.
    seed
        For the order of the images, their variations, and dropout.
    batch_size, learning_rate, weight_decay
        The largest learning rate, and the other settings of AdamW.
    balance
        ``None`` for squared errors, with which bands are shortest. They lose rare classes, though:
        the outputs are flat where a class is unlikely, so that one that was lost stays lost. A
        number for cross entropy, and how much more rare classes count: see :func:`class_weights`.
    augment
        Data augmentation; ``None`` for none.
    checkpoint
        File that is written atomically after every epoch. A checkpoint with the same initial
        weights, data and settings is resumed; one of another training is an error; a damaged one
        is a warning, and training starts over.
    progress
        Called after every epoch with a status line.

    Returns
    -------
    nn.Sequential
        The network.

    Examples
    --------
    >>> model = segmentation_nets.residual_net(4, width=4, outputs=4, hidden=4, dilations=(1,))
    >>> _ = fit(model, label_maps.shapes(16, size=(16, 24)), epochs=1, progress=print)
    epoch 1 of 1: loss ...
    """
    settings = {
        "epochs": epochs, "seed": seed, "batch_size": batch_size, "learning_rate": learning_rate,
        "weight_decay": weight_decay, "balance": balance,
        "augment": None if augment is None else asdict(augment),
        "first weights": fingerprint(model), "data": _fingerprint(data),
    }  # fmt: skip
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True
    )
    saved = None if checkpoint is None else _Checkpoint(checkpoint, settings)
    done = 0 if saved is None else saved.restore(model, optimizer)
    steps = epochs * -(-len(data) // batch_size)
    loss_of = _loss(model, data, balance)
    with torch.random.fork_rng(devices=[]):
        for epoch in range(done, epochs):
            losses = []
            generator = _epoch_generator(seed, epoch)
            model.train()
            batches = _batches(data, batch_size, augment, generator)
            for step, (x, labels) in enumerate(batches, epoch * steps // epochs):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * one_cycle(step, steps)
                optimizer.zero_grad()
                loss = loss_of(x, labels)
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            if saved is not None:
                saved.keep(model, optimizer, epoch + 1)
            progress(f"epoch {epoch + 1} of {epochs}: loss {sum(losses) / len(losses):.3f}")
    return model.eval()


def _loss(
    model: nn.Sequential, data: LabelledImages, balance: float | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss as a function of a batch of inputs and label maps."""
    if balance is None:
        return lambda x, labels: masked_mse(
            model(x), targets(labels, data.classes, ignore=data.ignore)
        )
    weights, logits = class_weights(data, balance), segmentation_nets.without_scores(model)
    return lambda x, labels: weighted_loss(logits(x), blurred_shares(labels, data), weights)


def _epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Seed the random numbers of an epoch, including the global ones (for dropout)."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    start = int.from_bytes(digest[:7], "big")
    torch.manual_seed(start)
    return torch.Generator().manual_seed(start)


def _batches(
    data: LabelledImages, batch_size: int, augment: Augment | None, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and label maps of one epoch."""
    for rows in torch.randperm(len(data), generator=generator).split(batch_size):
        pixels, labels = data.pixels[rows], data.labels[rows]
        if augment is None:
            x = label_maps.normalised(pixels)
        else:
            x, labels = augment(pixels, labels, generator)
        yield x, labels


def _fingerprint(data: LabelledImages) -> str:
    digest = hashlib.sha256(f"{data.class_names} {data.ignore}".encode())
    for tensor in (data.pixels, data.labels):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


class _Checkpoint:
    """A file with the state of one training, identified by its settings."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.dumps(settings, sort_keys=True)

    def keep(self, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Write weights, optimizer and number of epochs; the rest follows from the number."""
        tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
        for number, parts in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{part}": value for part, value in parts.items()}
        metadata = {"format": _FORMAT, "settings": self.settings, "epoch": str(epoch)}
        cache_files.keep(self.path, cache_files.pack(tensors, metadata))

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the stored state; return the number of finished epochs."""
        read = self._read()
        if read is None:
            return 0
        tensors, epoch = read
        state: dict[int, dict[str, Tensor]] = {}
        weights = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "model":
                weights[rest] = value
            else:
                number, _, part = rest.partition(".")
                state.setdefault(int(number), {})[part] = value
        model.load_state_dict(weights)
        optimizer.load_state_dict(
            {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
        )
        return epoch

    def _read(self) -> tuple[dict[str, Tensor], int] | None:
        data = cache_files.look_up(self.path)
        if data is None:
            return None
        try:
            tensors, metadata = cache_files.unpack(data)
        except ValueError as error:
            warnings.warn(
                f"the checkpoint {self.path} is damaged ({error}); training starts over",
                FFCPWarning,
                stacklevel=4,
            )
            return None
        if metadata.get("format") != _FORMAT or metadata.get("settings") != self.settings:
            raise ValueError(
                f"{self.path} is the checkpoint of another training: "
                f"{_difference(metadata, self.settings)}. Delete it, or pass another path"
            )
        return tensors, int(metadata["epoch"])


def _difference(metadata: Mapping[str, str], wanted: str) -> str:
    """Return in which settings the checkpoint of another training differs.

    >>> old = {"format": _FORMAT, "settings": '{"epochs": 3, "seed": 0}'}
    >>> _difference(old, '{"epochs": 4, "seed": 0}')
    'its settings differ in: epochs'
    """
    if metadata.get("format") != _FORMAT:
        return "it is not a checkpoint of a training"
    old, new = json.loads(metadata["settings"]), json.loads(wanted)
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return f"its settings differ in: {', '.join(names)}"


# --- the networks of the experiments --------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A network with the data and the settings it is trained with."""

    build: Callable[[int], nn.Sequential]
    data: Callable[[int], LabelledImages]
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    balance: float | None
    augment: Augment | None
    #: What else the weights depend on; to be changed with ``build`` or ``data``.
    version: str

    def key(self, name: str, seed: int) -> dict[str, Any]:
        """Return the settings that the weights depend on."""
        settings = {k: v for k, v in vars(self).items() if k not in ("build", "data", "augment")}
        augment = None if self.augment is None else asdict(self.augment)
        return {"segmentation": name, "seed": seed, "augment": augment, **settings}


def _training_shapes(seed: int) -> LabelledImages:
    # Far from any seed used for calibration and test.
    return label_maps.shapes(800, seed=1_000_000 + seed)


def _training_camvid(seed: int) -> LabelledImages:
    return label_maps.camvid(splits=("train",))["train"]


#: Settings of the networks of :func:`trained`.
RECIPES = {
    "shapes": Recipe(
        segmentation_nets.shapes_net, _training_shapes, epochs=12, batch_size=8, learning_rate=6e-3,
        weight_decay=1e-3, balance=None, augment=None, version="4",
    ),
    "camvid": Recipe(
        segmentation_nets.camvid_net, _training_camvid, epochs=30, batch_size=8, learning_rate=4e-3,
        weight_decay=1e-2, balance=0.5, augment=Augment(smallest=0.5, size=0.75, light=0.15),
        version="4",
    ),
}  # fmt: skip


def trained(name: str, seed: int = 0, progress: Progress = lambda message: None) -> nn.Sequential:
    """Return a trained network, from the cache if it is there.

    Parameters
    ----------
    name
        ``"shapes"`` (about a minute, no file is needed) or ``"camvid"`` (about five minutes,
        more if other programs run).
    seed
        For the first weights and the training; for shapes also for the training images.
    progress
        Called after every epoch with a status line.

    Returns
    -------
    nn.Sequential
        Network with a ``feature`` and a ``head``, in eval mode.
    """
    if name not in RECIPES:
        raise ValueError(f"name must be one of {', '.join(RECIPES)}, got {name!r}")
    recipe = RECIPES[name]
    key = recipe.key(name, seed)
    checkpoint = result_cache.place("training", key, ".safetensors")

    def train() -> nn.Module:
        return fit(
            recipe.build(seed), recipe.data(seed), epochs=recipe.epochs, seed=seed,
            batch_size=recipe.batch_size, learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay, balance=recipe.balance, augment=recipe.augment,
            checkpoint=checkpoint, progress=progress,
        )  # fmt: skip

    model = result_cache.network(key, lambda: recipe.build(seed), train)
    assert isinstance(model, nn.Sequential)
    checkpoint.unlink(missing_ok=True)  # the network itself is cached now
    return model
