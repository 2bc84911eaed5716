"""The pictures of the task pages: ``make pictures`` draws them again into docs/pictures.

They need the data of the experiments (``FFCP_DATA``), and the one of tables a browser. Names given
as arguments draw these only: ``python docs/pictures.py groups deploy``.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import ffcp

OUT = Path(__file__).parent / "pictures"
MOST = 100_000  # bytes of a picture


def save(figure: Figure, name: str) -> None:
    """Write a figure as a small PNG: few colours are enough for lines and areas."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    shrink(Image.open(buffer), name)


def shrink(image: Image.Image, name: str) -> None:
    """Write an image with as many colours as fit into the bytes allowed."""
    OUT.mkdir(exist_ok=True)
    for colours in (128, 64, 32, 16):
        small = io.BytesIO()
        image.convert("RGB").quantize(colours).save(small, "png", optimize=True)
        if small.tell() < MOST:
            break
    (OUT / f"{name}.png").write_bytes(small.getvalue())
    print(f"{name}.png: {small.tell():,} bytes, {colours} colours")


def trained(
    model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor], epochs: int
) -> Any:
    """Train a network by Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval()


def bike() -> tuple[nn.Module, list[Tensor], list[Tensor], np.ndarray]:
    """Train a network on bike rentals: parts of x and y (train, calibrate, test), test hours."""
    from ffcp_paper import datasets

    torch.manual_seed(0)
    table = datasets.load("bike")
    order = torch.randperm(len(table.y))
    x, y = torch.from_numpy(table.x)[order], torch.from_numpy(table.y)[order, None] / 100
    hours = x[:, table.names.index("hour")].numpy()
    x = x[:, x[:4000].std(dim=0) > 0]
    x = (x - x[:4000].mean(dim=0)) / x[:4000].std(dim=0)
    layers = nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = trained(nn.Sequential(*layers), x[:4000], y[:4000], nn.functional.mse_loss, 40)
    parts = [4000, 4000, len(x) - 8000]
    return model, list(x.split(parts)), list(y.split(parts)), hours


def regression() -> None:
    """Bands of CP and of Auto, against the prediction."""
    model, x, y, _ = bike()
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    auto = ffcp.Auto(model, seed=0, support=(0, None)).fit(x[0], y[0]).calibrate(x[1], y[1])
    for axis, (name, predictor) in zip(
        axes, {"CP": ffcp.CP(model).calibrate(x[1], y[1]), "Auto": auto}.items(), strict=True
    ):
        band = predictor.predict_interval(x[2], alpha=0.1)
        ffcp.plots.bands(band, y=y[2], ax=axis, ylabel="rentals in an hour, hundreds")
        covered, length = ffcp.metrics.coverage(band, y[2]), ffcp.metrics.mean_length(band)
        axis.set_title(
            f"{name}: {float(covered):.1%} covered, mean length {length:.2f}", fontsize=10
        )
    axes[0].get_legend().remove()
    axes[1].set_ylabel("")
    save(figure, "regression")


def quantiles() -> None:
    """Learned quantiles before and after calibrating."""
    torch.manual_seed(0)
    x = torch.rand(1600, 1)
    y = torch.sin(6 * x[:, 0]) + x[:, 0] * torch.randn(1600)
    layers = nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    loss = lambda output, y: ffcp.pinball_loss(output, y, levels=(0.05, 0.95))  # noqa: E731
    model = trained(nn.Sequential(*layers), x[:60], y[:60], loss, 1500)
    new, truth = x[600:], y[600:]
    ends = model(new).detach().sort(dim=1).values
    alone = ffcp.Interval(ends[:, :1], ends[:, 1:], ends.mean(dim=1, keepdim=True), 0.1)
    band = ffcp.CQR(model).calibrate(x[100:600], y[100:600]).predict_interval(new, alpha=0.1)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, one) in zip(
        axes, {"quantiles of the network": alone, "CQR": band}.items(), strict=True
    ):
        ffcp.plots.bands(one, new[:, 0], truth, ax=axis, xlabel="x")
        covered = ffcp.metrics.coverage(one, truth)
        axis.set_title(f"{name}: {float(covered):.1%} covered", fontsize=10)
    axes[0].get_legend().remove()
    axes[1].set_ylabel("")
    save(figure, "quantiles")


def label_sets() -> None:
    """Digits and their sets."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits))
    x, y = torch.from_numpy(pixels / 16).float()[order], torch.from_numpy(digits)[order]
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    model = trained(nn.Sequential(*layers), x[:300], y[:300], nn.functional.cross_entropy, 15)
    predictor = ffcp.LAC(model).calibrate(x[300:1000], y[300:1000])
    found = predictor.predict_set(x[1000:], alpha=0.05)
    rows = found.sizes.argsort(descending=True, stable=True)
    shown = [*rows[:4].tolist(), *rows[-4:].tolist()]
    figure = Figure(figsize=(9, 1.7), layout="constrained")
    for axis, row in zip(figure.subplots(1, 8), shown, strict=True):
        axis.imshow(x[1000 + row].reshape(8, 8), cmap="gray_r")
        labels = ", ".join(str(int(label)) for label in found.labels[row])
        axis.set_title(f"{{{labels}}}", fontsize=10)
        axis.set_xlabel(f"truth: {int(y[1000 + row])}", fontsize=9)
        axis.set(xticks=[], yticks=[])
    save(figure, "label_sets")


def segmentation() -> None:
    """Road scenes: image, prediction, number of labels."""
    from ffcp_paper import scenes, segnets
    from ffcp_paper.images import read

    road = scenes.camvid(360, 480, splits=("val",))["val"]
    cal, test = (road.take(rows) for rows in scenes.split(len(road), 70, seed=0))
    model = segnets.deeplab(read(segnets.DEEPLAB_FILE), scores=False).eval()
    sets = ffcp.segmentation.PixelSets(model, ignore=road.ignore)
    pairs = zip(cal.pixels.split(4), cal.labels.split(4), strict=True)
    sets.calibrate((segnets.deeplab_inputs(pixels), labels) for pixels, labels in pairs)
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots(2, 3)
    for line, row in zip(axes, (0, 9), strict=True):
        found = sets.predict_set(segnets.deeplab_inputs(test.pixels[[row]]), alpha=0.1, share=0.9)
        line[0].imshow(test.pixels[row].permute(1, 2, 0))
        line[1].imshow(found.prediction[0], cmap="tab20", vmin=0, vmax=19)
        drawn = line[2].imshow(found.size[0], cmap="magma", vmin=1, vmax=6)
    for axis, title in zip(axes[0], ("image", "prediction", "labels in the set"), strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    figure.colorbar(drawn, ax=axes[:, 2], shrink=0.8)
    save(figure, "segmentation")


def groups() -> None:
    """Coverage of three groups: CP, groups, neighbours."""
    model, x, y, hours = bike()
    rush = np.isin(hours, (7, 8, 9, 16, 17, 18, 19))
    named = np.where(rush, "rush", np.where((hours < 7) | (hours > 20), "night", "day"))
    cal, test = named[4000:8000], named[8000:]
    bands = {
        "CP": ffcp.CP(model).calibrate(x[1], y[1]).predict_interval(x[2]),
        "CP, groups=": ffcp.CP(model)
        .calibrate(x[1], y[1], groups=cal)
        .predict_interval(x[2], groups=test),
        "LCP": ffcp.LCP(model, seed=0).calibrate(x[1], y[1]).predict_interval(x[2]),
    }
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axis = figure.subplots()
    colours = ("#6e7781", "#1f6feb", "#1a7f37")
    for place, ((name, band), colour) in enumerate(zip(bands.items(), colours, strict=True)):
        for spot, group in enumerate(("night", "day", "rush")):
            rows = torch.from_numpy(test == group)
            found = ffcp.metrics.coverage((band.lower[rows], band.upper[rows]), y[2][rows])
            share = float(found)
            ends = [[share - found.low], [found.high - share]]
            label = name if spot == 0 else None
            axis.errorbar(spot + 0.2 * (place - 1), share, ends, fmt="o", color=colour, label=label)
    axis.axhline(0.9, color="black", lw=0.9, ls="--")
    axis.set(xticks=range(3), xticklabels=["night", "day", "rush"], ylabel="covered")
    axis.legend(frameon=False, fontsize=9)
    save(figure, "groups")


def stream() -> None:
    """Coverage over time, as ``ffcp-paper stream`` draws it."""
    from ffcp_paper import streams

    save(streams.picture([streams.run(name) for name in streams.NAMES]), "stream")


def tables() -> None:
    """Draw the top of the report of a fit, in a browser."""
    import pandas as pd
    from playwright.sync_api import sync_playwright

    from ffcp import tables as door
    from ffcp_paper import datasets

    data = datasets.load("bike")
    frame = pd.DataFrame(data.x, columns=list(data.names)).assign(rentals=data.y)
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        door.fit(frame, "rentals", minutes=1.0, seed=0).save(f"{folder}/bike.ffcp")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 860})
        page.goto(f"file://{folder}/bike.ffcp/report.html")
        shrink(Image.open(io.BytesIO(page.screenshot())), "tables")
        browser.close()


def deploy() -> None:
    """How much wider the file's bands are than the library's."""
    import onnxruntime

    torch.manual_seed(0)
    x = torch.randn(3000, 20)
    y = x[:, :3].sum(dim=1, keepdim=True) + torch.randn(3000, 1)
    layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = trained(nn.Sequential(*layers), x[:500], y[:500], nn.functional.mse_loss, 20)
    predictor = ffcp.FFCP(model, feature="2").calibrate(x[500:1000], y[500:1000])
    band = predictor.predict_interval(x[1000:], alpha=0.1)
    with TemporaryDirectory() as folder:
        predictor.export(f"{folder}/band.onnx", x[500:1000])
        session = onnxruntime.InferenceSession(f"{folder}/band.onnx")
        lower, upper = session.run(["lower", "upper"], {"x": x[1000:].numpy()})
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axis = figure.subplots()
    width = band.width.double()
    sides = {
        "lower end": (band.lower.double() - torch.from_numpy(lower)) / width,
        "upper end": (torch.from_numpy(upper) - band.upper.double()) / width,
    }
    for name, beyond in sides.items():
        axis.hist(1e6 * beyond[:, 0].numpy(), bins=60, histtype="step", lw=1.5, label=name)
    axis.axvline(0, color="black", lw=0.9, ls="--")
    axis.set(xlabel="outside of the library's band, in millionths of its width", ylabel="rows")
    axis.legend(frameon=False, fontsize=9)
    save(figure, "deploy")


def scale() -> None:
    """Ranks that summaries cost at every level, and what they keep of a stream."""
    random = torch.Generator().manual_seed(0)
    scores = torch.empty(1_000_000).exponential_(generator=random)
    alphas = np.sort(np.random.default_rng(0).uniform(0.001, 0.5, 300)).tolist()
    whole = ffcp.CP(ffcp.Stored()).calibrate(torch.zeros_like(scores), scores)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = whole.predict_interval(torch.zeros(1), alpha=alphas).upper.flatten()
    ordered = scores.sort().values
    for error, colour in (("1e-2", "#bc4c00"), ("1e-3", "#1f6feb"), ("1e-4", "#1a7f37")):
        small = ffcp.CP(ffcp.Stored()).calibrate(torch.zeros_like(scores), scores)
        small.compress(rank_error=float(error))
        above = small.predict_interval(torch.zeros(1), alpha=alphas).upper.flatten()
        ranks = [torch.searchsorted(ordered, end.contiguous(), right=True) for end in (ends, above)]
        share = ((ranks[1] - ranks[0]) / len(scores)).clamp(min=1e-6)
        left.plot(alphas, share, ".", ms=3, color=colour, label=f"rank_error={error}")
        left.axhline(float(error), color=colour, lw=0.9, ls="--")
    left.set(xlabel="alpha", ylabel="ranks above, share", yscale="log", ylim=(8e-7, 3e-2))
    near = {"bbox_to_anchor": (0, 1), "columnspacing": 0.5, "handletextpad": 0.0}
    left.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", **near)
    rows = [10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6]
    for error, name in ((None, "all scores"), (1e-4, "rank_error=1e-4")):
        kept = []
        for count in rows:
            parts = (torch.rand(10_000, generator=random) for _ in range(count // 10_000))
            predictor = ffcp.CP(ffcp.Stored())
            predictor.calibrate(((torch.zeros_like(y), y) for y in parts), rank_error=error)
            kept.append(8 * predictor.calibration.scores.numel())
        right.plot(rows, kept, "o-", ms=4, label=name)
    right.set(xlabel="rows", ylabel="bytes kept", xscale="log", yscale="log")
    right.legend(frameon=False, fontsize=8)
    save(figure, "scale")


ALL = (regression, quantiles, label_sets, segmentation, groups, stream, tables, deploy, scale)

if __name__ == "__main__":
    for draw in ALL:
        if len(sys.argv) == 1 or draw.__name__ in sys.argv[1:]:
            draw()
