"""What four processes do together, scene by scene; run by ``worker``, checked by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import ffcp
from ffcp.segmentation import PixelSets
from tests.conftest import normal, small_mlp

X, NOISE = normal(1001, 4, seed=0), normal(1001, seed=1)
Y = 3 * (0.2 + X[:, 0].abs()) * NOISE  # noise that the network's input explains
TWO = normal(1001, 2, seed=2)
LABELS = torch.arange(1001) % 3
GROUPS = ["a" if first > 0 else "b" for first in X[:, 0].tolist()]
WEIGHTS = normal(1001, seed=3).exp()
IMAGES, MAPS = normal(41, 2, 6, 6, seed=4), torch.arange(41 * 36).reshape(41, 6, 6) % 3
UNEVEN = (700, 0, 1, 300)
near = ffcp.kernels.Localizer("gaussian", on="input")


def part(rank: int, sizes: tuple[int, ...] = UNEVEN) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def far_from_zero(seen: ffcp.BatchOutput) -> Tensor:
    return 0.3 + seen.x[:, 0].abs()


def sides(x: Tensor) -> Tensor:
    return x[:, :2] > 0


def pixels() -> PixelSets:
    torch.manual_seed(3)
    return PixelSets(nn.Conv2d(2, 3, 1))


# By name: how the predictor is made, targets, and what else calibrate takes, by row.
METHODS: dict[str, tuple[Callable[[], Any], Tensor, dict[str, Any]]] = {
    "CP": (lambda: ffcp.CP(small_mlp()), Y, {}),
    "two outputs": (lambda: ffcp.FFCP(small_mlp(outputs=2), "0"), TWO, {}),
    "groups": (lambda: ffcp.CP(small_mlp()), Y, {"groups": GROUPS}),
    "weights": (
        lambda: ffcp.CP(small_mlp(), calibration=ffcp.calibrations.Weighted("given")),
        Y, {"weights": WEIGHTS},
    ),
    "shift": (
        lambda: ffcp.CP(small_mlp(), calibration=ffcp.calibrations.Weighted("learn")),
        Y, {"new": X + 0.3},
    ),
    "choice": (
        lambda: ffcp.IntervalPredictor(small_mlp(), scale=[ffcp.scales.Constant(), far_from_zero]),
        Y, {},
    ),
    "FFLCP": (lambda: ffcp.FFLCP(small_mlp(), "0", near), Y, {}),
    "fitted": (lambda: ffcp.Learned(small_mlp(), seed=0).fit(X + 1, Y), Y, {}),
    "LCP": (lambda: ffcp.LCP(small_mlp(), "nearest"), Y, {}),
    "Learned": (lambda: ffcp.Learned(small_mlp(), seed=0), Y, {}),
    "Auto": (lambda: ffcp.Auto(small_mlp(), seed=0), Y, {}),
    "FCP": (lambda: ffcp.FCP(small_mlp(), "0", steps=2), Y, {}),
    "RAPS": (lambda: ffcp.RAPS(small_mlp(outputs=3)), LABELS, {}),
    "RAPS tuned": (
        lambda: ffcp.RAPS(small_mlp(outputs=3), tune="size", temperature="fit"), LABELS, {},
    ),
    "by class": (
        lambda: ffcp.LAC(small_mlp(outputs=3), calibration=ffcp.calibrations.ByLabel()),
        LABELS, {},
    ),
    "risk": (lambda: ffcp.RiskControl(small_mlp(outputs=3)), TWO[:, [0, 1, 0]] > 0, {}),
    "VennAbers": (lambda: ffcp.VennAbers(small_mlp(outputs=3)), LABELS, {}),
    "two classes": (lambda: ffcp.VennAbers(small_mlp(outputs=2)), LABELS % 2, {}),
    "conditional": (
        lambda: ffcp.CP(small_mlp(), calibration=ffcp.calibrations.Conditional(sides)), Y, {},
    ),
    "directions": (
        lambda: ffcp.CP(small_mlp(), calibration=ffcp.calibrations.Conditional("0")), Y, {},
    ),
    "ellipsoid": (lambda: ffcp.CP(small_mlp(outputs=2), joint="ellipsoid"), TWO, {}),
}  # fmt: skip


def calibrated(rank: int, name: str, sizes: tuple[int, ...] = UNEVEN, **more: Any) -> Any:
    make, y, kept = METHODS[name]
    rows, predictor = part(rank, sizes), make()
    kept = {n: v if n == "new" else v[rows] for n, v in kept.items()}
    loader = ((x, t) for x, t in zip(X[rows].split(100), y[rows].split(100), strict=True) if len(x))
    if "groups" in kept or "weights" in kept:
        return ffcp.distributed.calibrate(predictor, X[rows], y[rows], **kept, **more)
    return ffcp.distributed.calibrate(predictor, loader, **kept, **more)


def sampled(size: int, by_batch: bool = False, **options: Any) -> Any:
    data = TensorDataset(X[:size], Y[:size])
    sampler = DistributedSampler(data, **options)
    if by_batch:
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 64, drop_last=False))
    else:
        loader = DataLoader(data, batch_size=64, sampler=sampler)
    return ffcp.distributed.calibrate(ffcp.CP(small_mlp()), loader)


def sampled_groups(rank: int) -> Any:
    data = TensorDataset(X, Y)
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=64, sampler=sampler)
    groups = [GROUPS[row] for row in sampler]  # the repeated ones, too
    return ffcp.distributed.calibrate(ffcp.CP(small_mlp()), loader, groups=groups)


def uniform(rank: int, seed: int | None = None) -> Any:
    """Scores that are nothing but the random numbers of their rows."""
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    predictor = ffcp.APS(model, temperature=1.0, seed=seed)
    rows = part(rank, (200, 200, 200, 201))
    ffcp.distributed.calibrate(predictor, X[rows], LABELS[rows] * 0)
    rows = slice(801 + 50 * rank, 851 + 50 * rank)
    return ffcp.distributed.calibrate(predictor, X[rows], LABELS[rows] * 0, update=True)


def updated(rank: int, rank_error: Any = None) -> Any:
    predictor = ffcp.CP(small_mlp()).calibrate(X[:100], Y[:100])
    torch.manual_seed(0)
    predictor._state = replace(predictor._state, runs=("the same in every process",))
    rows = slice(100 + 200 * rank, 300 + 200 * rank)
    call = ffcp.distributed.calibrate
    return call(predictor, X[rows], Y[rows], update=True, rank_error=rank_error)


# -- what goes wrong -------------------------------------------------------------------------------


def broken(rank: int, bad: int = 2) -> Any:
    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(4):
            if rank == bad and number == 2:
                raise OSError("the disk of this rank is gone")
            start = 250 * rank + 50 * number
            yield X[start : start + 50], Y[start : start + 50]

    return ffcp.distributed.calibrate(ffcp.CP(small_mlp()), loader())


def not_a_number(rank: int) -> Any:
    y = Y.clone()
    y[517] = torch.nan
    rows = part(rank, (250, 250, 250, 251))
    return ffcp.distributed.calibrate(ffcp.Learned(small_mlp()), X[rows], y[rows])


def other_weights(rank: int) -> Any:
    model = small_mlp()
    if rank == 3:
        nn.init.zeros_(model[0].weight)
    return ffcp.distributed.calibrate(ffcp.CP(model), X[rank::4], Y[rank::4])


def other_settings(rank: int) -> Any:
    side = "upper" if rank == 1 else "both"
    return ffcp.distributed.calibrate(ffcp.CP(small_mlp(), side=side), X[rank::4], Y[rank::4])


def all_rows_in_all_ranks(rank: int) -> Any:
    return ffcp.distributed.calibrate(ffcp.CP(small_mlp()), DataLoader(TensorDataset(X, Y), 64))


def other_calibrations(rank: int) -> Any:
    predictor = ffcp.CP(small_mlp()).calibrate(X[rank : 100 + rank], Y[rank : 100 + rank])
    return ffcp.distributed.calibrate(predictor, X[rank::4], Y[rank::4], update=True)


def unchanged(rank: int) -> Any:
    """A calibration that fails leaves that which there was."""
    predictor = ffcp.CP(small_mlp()).calibrate(X, Y)
    before = predictor.state_dict()
    try:
        ffcp.distributed.calibrate(predictor, X[rank::4], Y[rank::4] * (torch.nan if rank else 1))
    except ValueError:
        after = predictor.state_dict()
        return all(torch.equal(before[name], after[name]) for name in before)
    return False


SCENES: dict[str, Callable[[int], Any]] = {
    **{name: lambda rank, name=name: calibrated(rank, name) for name in METHODS},
    "pixels": lambda rank: ffcp.distributed.calibrate(pixels(), IMAGES[rank::4], MAPS[rank::4]),
    "even": lambda rank: calibrated(rank, "CP", (250, 250, 250, 251)),
    "one rank": lambda rank: calibrated(rank, "choice", (0, 0, 1001, 0)),
    "compressed": lambda rank: calibrated(rank, "CP", rank_error=0.02),
    "compressed groups": lambda rank: calibrated(rank, "groups", rank_error=0.02),
    "padded": lambda rank: sampled(1001),
    "padded in order": lambda rank: sampled(1001, shuffle=False),
    "padded by batch": lambda rank: sampled(1001, by_batch=True),
    "more ranks than rows": lambda rank: sampled(1),
    "tail dropped": lambda rank: sampled(1001, drop_last=True),
    "uniform": uniform,
    "uniform by seed": lambda rank: uniform(rank, seed=5),
    "padded groups": lambda rank: sampled_groups(rank),
    "updated": updated,
    "updated and compressed": lambda rank: updated(rank, 0.02),
    "broken": broken,
    "broken everywhere": lambda rank: broken(rank, rank),
    "not a number": not_a_number,
    "other weights": other_weights,
    "other settings": other_settings,
    "all rows in all ranks": all_rows_in_all_ranks,
    "no rows": lambda rank: calibrated(rank, "CP", (0, 0, 0, 0)),
    "same rank": lambda rank: sampled(1001, num_replicas=4, rank=0),
    "other replicas": lambda rank: sampled(1001, num_replicas=8, rank=rank),
    "other seeds": lambda rank: sampled(1001, seed=rank),
    "other calibrations": other_calibrations,
    "compressed localized": lambda rank: calibrated(rank, "LCP", rank_error=0.02),
    "unchanged": unchanged,
    "after all that": lambda rank: calibrated(rank, "CP"),
}


def play(rank: int, folder: Path) -> None:
    """Play all scenes, and write down what came of each."""
    results: dict[str, Any] = {}
    for name, scene in SCENES.items():
        try:
            found = scene(rank)
        except Exception as error:
            results[name] = (type(error).__name__, str(error))
            continue
        if isinstance(found, bool):
            results[name] = found
            continue
        kept = folder / f"{rank} {name}"
        found.save(kept)
        results[name] = (kept.read_bytes(), dict(found.calibration.state()))
    dist.barrier()
    torch.save(results, folder / f"results {rank}")
