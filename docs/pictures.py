"""The pictures of the task pages: ``make pictures`` draws them again into docs/pictures.

They need the data of the experiments (``FFCP_DATA``), and the one of tables a browser. Names given
as arguments draw these only: ``python docs/pictures.py groups deploy``.
"""

from __future__ import annotations

import io
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
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


def bike() -> tuple[nn.Module, list[Tensor], list[Tensor], np.ndarray, list[str]]:
    """Train a network on bike rentals: x and y (train, calibrate, test), hours, columns."""
    from ffcp_paper.data import datasets

    torch.manual_seed(0)
    table = datasets.load("bike")
    order = torch.randperm(len(table.y))
    x, y = torch.from_numpy(table.x)[order], torch.from_numpy(table.y)[order, None] / 100
    hours = x[:, table.names.index("hour")].numpy()
    varies = x[:4000].std(dim=0) > 0
    x, names = x[:, varies], [n for n, kept in zip(table.names, varies, strict=True) if kept]
    x = (x - x[:4000].mean(dim=0)) / x[:4000].std(dim=0)
    layers = nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = trained(nn.Sequential(*layers), x[:4000], y[:4000], nn.functional.mse_loss, 40)
    parts = [4000, 4000, len(x) - 8000]
    return model, list(x.split(parts)), list(y.split(parts)), hours, names


def regression() -> None:
    """Intervals of CP and of Auto, against the prediction."""
    model, x, y, *_ = bike()
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    auto = ffcp.Auto(model, seed=0, support=(0, None)).fit(x[0], y[0]).calibrate(x[1], y[1])
    for axis, (name, predictor) in zip(
        axes, {"CP": ffcp.CP(model).calibrate(x[1], y[1]), "Auto": auto}.items(), strict=True
    ):
        interval = predictor.predict_interval(x[2], alpha=0.1)
        ffcp.plots.intervals(interval, y=y[2], ax=axis, ylabel="rentals in an hour, hundreds")
        covered, length = ffcp.metrics.coverage(interval, y[2]), ffcp.metrics.mean_length(interval)
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
    new, target = x[600:], y[600:]
    ends = model(new).detach().sort(dim=1).values
    alone = ffcp.Interval(ends[:, :1], ends[:, 1:], ends.mean(dim=1, keepdim=True), 0.1)
    interval = ffcp.CQR(model).calibrate(x[100:600], y[100:600]).predict_interval(new, alpha=0.1)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (name, one) in zip(
        axes, {"quantiles of the network": alone, "CQR": interval}.items(), strict=True
    ):
        ffcp.plots.intervals(one, new[:, 0], target, ax=axis, xlabel="x")
        covered = ffcp.metrics.coverage(one, target)
        axis.set_title(f"{name}: {float(covered):.1%} covered", fontsize=10)
    axes[0].get_legend().remove()
    axes[1].set_ylabel("")
    save(figure, "quantiles")


def digits(epochs: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Train a network on 300 of scikit-learn's digits; return it and all rows."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    x, y = torch.from_numpy(pixels / 16).float()[order], torch.from_numpy(labels)[order]
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    loss = nn.functional.cross_entropy
    return trained(nn.Sequential(*layers), x[:300], y[:300], loss, epochs), x, y


def risk() -> None:
    """Accuracy and share of answered digits at every level, and the certified levels."""
    model, x, y = digits(epochs=40)
    control = ffcp.RiskControl(model, "wrong_answers", sets="answers", pac=0.9, seed=0)
    certified = control.calibrate(x[300:1000], y[300:1000]).certified(alpha=0.05)
    losses = control.losses(x[1000:], y[1000:])
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axis = figure.subplots()
    for level in certified.levels.tolist():
        axis.axvspan(level - 0.005, level + 0.005, color="0.85", lw=0)
    answered = ~losses.isnan()
    axis.plot(control.grid, 1 - losses.nanmean(dim=0), color="C0", label="accuracy of answers")
    axis.plot(control.grid, answered.double().mean(dim=0), color="C1", label="share answered")
    axis.axhline(0.95, color="black", lw=0.8, ls="--")
    first = float(certified.levels[0])
    axis.set(xlabel="level: the smallest probability that is answered", xlim=(0, 1), ylim=(0, 1.02))
    axis.set_title(
        f"{len(certified.levels)} levels are certified; at the first, {first:g}, "
        f"{float(certified.shares[0, 0]):.0%} of the rows are answered",
        fontsize=10,
    )
    axis.legend(loc="lower left")
    save(figure, "risk")


def probabilities() -> None:
    """Reliability of an overconfident network, before and after Venn-Abers."""
    torch.manual_seed(0)
    x = torch.randn(42_300, 2)
    y = (torch.rand(len(x)) < torch.sigmoid(3 * x[:, 0] * x[:, 1])).long()
    layers = nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    model = trained(nn.Sequential(*layers), x[:300], y[:300], nn.functional.cross_entropy, 150)
    venn = ffcp.VennAbers(model).calibrate(x[300:2300], y[300:2300])
    x, y = x[2300:], y[2300:].double()
    stated = {
        "softmax": model(x).detach().double().softmax(dim=1)[:, 1],
        "VennAbers": venn.predict_proba(x)[:, 1],
    }
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    for axis, (name, p) in zip(figure.subplots(1, 2, sharey=True), stated.items(), strict=True):
        bins = p.argsort(stable=True).tensor_split(20)
        stated_mean, observed = ([float(of[rows].mean()) for rows in bins] for of in (p, y))
        axis.plot([0, 1], [0, 1], color="black", lw=0.8, ls="--")
        axis.plot(stated_mean, observed, "o-", ms=4, color="C0")
        loss = float(nn.functional.binary_cross_entropy(p.clamp(1e-12, 1 - 1e-12), y))
        axis.set_title(f"{name}: log loss {loss:.3f}", fontsize=10)
        axis.set(xlabel="probability of class 1", ylabel="share of class 1", aspect="equal")
        axis.label_outer()
    save(figure, "probabilities")


def selection() -> None:
    """Hours with many rentals, selected with few false discoveries."""
    model, x, y, _ = bike()
    many, rows, targets = 4.0, torch.cat(x[1:]), torch.cat(y[1:])
    true, guess = targets[:, 0] > many, model(rows).detach()[:, 0]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, 2, sharey=True), ("CP", "clipped"), strict=True):
        found, wrong = [], []
        for seed in range(20):
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
            old, new = order[:4000], order[4000:]
            kept = targets[old] if name == "CP" else torch.where(targets[old] > many, 1e6, many)
            predictor = ffcp.CP(model, side="lower").calibrate(rows[old], kept)
            selected = ffcp.conformal_selection(predictor, rows[new], above=many, fdr=0.1).selected
            found.append(float(selected[true[new]].double().mean()))
            wrong.append(float((~true[new])[selected].double().mean()))
        parts = {"not selected": (~selected, "0.8"), "right": (selected & true[new], "C0"),
                 "wrong": (selected & ~true[new], "C3")}  # fmt: skip
        for label, (which, colour) in parts.items():
            shown = new[which]
            axis.plot(guess[shown], targets[shown, 0], ".", ms=3, color=colour, label=label)
        axis.axhline(many, color="black", lw=0.8, ls="--")
        axis.set_title(
            f"{name}: {np.mean(found):.0%} found, {np.mean(wrong):.1%} wrong", fontsize=10
        )
        axis.set(xlabel="prediction", ylabel="rentals in an hour, hundreds")
        axis.label_outer()
    axis.legend(loc="upper left", markerscale=3)
    save(figure, "selection")


def classification() -> None:
    """Digits and their sets."""
    model, x, y = digits(epochs=15)
    predictor = ffcp.LAC(model).calibrate(x[300:1000], y[300:1000])
    found = predictor.predict_set(x[1000:], alpha=0.05)
    rows = found.sizes.argsort(descending=True, stable=True)
    shown = [*rows[:4].tolist(), *rows[-4:].tolist()]
    figure = Figure(figsize=(9, 1.7), layout="constrained")
    for axis, row in zip(figure.subplots(1, 8), shown, strict=True):
        axis.imshow(x[1000 + row].reshape(8, 8), cmap="gray_r")
        labels = ", ".join(str(int(label)) for label in found.labels[row])
        axis.set_title(f"{{{labels}}}", fontsize=10)
        axis.set_xlabel(f"label: {int(y[1000 + row])}", fontsize=9)
        axis.set(xticks=[], yticks=[])
    save(figure, "classification")


def segmentation() -> None:
    """Road scenes: image, prediction, number of labels."""
    from ffcp_paper.data import label_maps
    from ffcp_paper.data.images import read
    from ffcp_paper.networks import segmentation_nets

    road = label_maps.camvid(360, 480, splits=("val",))["val"]
    cal, test = (road.take(rows) for rows in label_maps.split(len(road), 70, seed=0))
    model = segmentation_nets.deeplab(read(segmentation_nets.DEEPLAB_FILE), scores=False).eval()
    sets = ffcp.segmentation.PixelSets(model, ignore=road.ignore)
    pairs = zip(cal.pixels.split(4), cal.labels.split(4), strict=True)
    sets.calibrate((segmentation_nets.deeplab_inputs(pixels), labels) for pixels, labels in pairs)
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots(2, 3)
    for line, row in zip(axes, (0, 9), strict=True):
        found = sets.predict_set(
            segmentation_nets.deeplab_inputs(test.pixels[[row]]), alpha=0.1, share=0.9
        )
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
    model, x, y, hours, _ = bike()
    rush = np.isin(hours, (7, 8, 9, 16, 17, 18, 19))
    named = np.where(rush, "rush", np.where((hours < 7) | (hours > 20), "night", "day"))
    cal, test = named[4000:8000], named[8000:]
    intervals = {
        "CP": ffcp.CP(model).calibrate(x[1], y[1]).predict_interval(x[2]),
        "CP, groups=": ffcp.CP(model)
        .calibrate(x[1], y[1], groups=cal)
        .predict_interval(x[2], groups=test),
        "LCP": ffcp.LCP(model, seed=0).calibrate(x[1], y[1]).predict_interval(x[2]),
    }
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axis = figure.subplots()
    colours = ("#6e7781", "#1f6feb", "#1a7f37")
    for place, ((name, interval), colour) in enumerate(
        zip(intervals.items(), colours, strict=True)
    ):
        for spot, group in enumerate(("night", "day", "rush")):
            rows = torch.from_numpy(test == group)
            found = ffcp.metrics.coverage((interval.lower[rows], interval.upper[rows]), y[2][rows])
            share = float(found)
            ends = [[share - found.low], [found.high - share]]
            label = name if spot == 0 else None
            axis.errorbar(spot + 0.2 * (place - 1), share, ends, fmt="o", color=colour, label=label)
    axis.axhline(0.9, color="black", lw=0.9, ls="--")
    axis.set(xticks=range(3), xticklabels=["night", "day", "rush"], ylabel="covered")
    axis.legend(frameon=False, fontsize=9)
    save(figure, "groups")


def conditional() -> None:
    """Coverage of overlapping groups, and under shifts: CP, Conditional on groups or a layer."""
    model, x, y, hours, names = bike()
    at = names.index("hour")
    slope, start = np.polyfit(x[1][:, at], hours[4000:8000], 1)
    coldest = x[0][:, names.index("temp")].min()

    def features(x: Tensor) -> Tensor:
        hour = (slope * x[:, at] + start).round()
        rush = ((hour - 8).abs() <= 1) | ((hour - 17.5).abs() <= 1.5)
        work, warmth = x[:, names.index("workingday")] > 0, x[:, names.index("temp")] - coldest
        return torch.stack([rush, (hour < 7) | (hour > 20), work, warmth], dim=1)

    calibrations = {
        "CP": ffcp.calibrations.Marginal(),
        "Conditional(features)": ffcp.calibrations.Conditional(features),
        'Conditional("3")': ffcp.calibrations.Conditional("3"),
    }
    made = {name: ffcp.CP(model, calibration=one) for name, one in calibrations.items()}
    made['Conditional("3")'].fit(x[0], y[0])
    inside = {
        name: one.calibrate(x[1], y[1]).predict_interval(x[2]).contains(y[2])[:, 0].double()
        for name, one in made.items()
    }
    rush, night, work, warmth = features(x[2]).double().T
    with torch.no_grad():
        along = model[:4](x[2]).double() @ made['Conditional("3")'].calibration.directions[:, 0]
    groups = {"night": night, "rush": rush, "working\nday": work, "free\nday": 1 - work}
    shifts = {
        "to warm\ndays": warmth,
        "to rush and\nworking days": rush + work,
        "along\nthe layer": along - along.min(),
        "against\nthe layer": along.max() - along,
    }
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, ratios in zip(figure.subplots(1, 2, sharey=True), (groups, shifts), strict=True):
        for place, (name, hits) in enumerate(inside.items()):
            for spot, ratio in enumerate(ratios.values()):
                share = (ratio * hits).sum() / ratio.sum()
                error = 2 * (ratio * (hits - share)).square().sum().sqrt() / ratio.sum()
                axis.errorbar(
                    spot + 0.2 * (place - 1), share, error, fmt="o",
                    color=("#6e7781", "#1f6feb", "#1a7f37")[place], label=None if spot else name,
                )  # fmt: skip
        axis.axhline(0.9, color="black", lw=0.9, ls="--")
        axis.set(xticks=range(len(ratios)), xticklabels=list(ratios))
    figure.axes[0].set(ylabel="covered", title="groups that overlap")
    figure.axes[1].set(title="inputs that shift")
    figure.axes[0].legend(frameon=False, fontsize=9)
    save(figure, "conditional")


def joint() -> None:
    """Ellipses and boxes of the power that a zone uses in ten and in twenty minutes."""
    import pandas as pd

    from ffcp_paper.data import datasets

    frame = pd.read_csv(datasets.FURTHER["tetuan_power"].files[0].require())
    power = torch.tensor(frame["Zone 1 Power Consumption"].to_numpy() / 1000).float()
    windows = power.unfold(0, 14, 1)
    x, y = windows[:, :12] - windows[:, 11:12], windows[:, 12:] - windows[:, 11:12]
    torch.manual_seed(0)
    order = torch.randperm(len(x))[:12_000]
    x, y = list(x[order].split(4000)), list(y[order].split(4000))
    layers = nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2)
    model = trained(nn.Sequential(*layers), x[0], y[0], nn.functional.mse_loss, 20)
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    for axis, layer in zip(figure.subplots(1, 2), ("output", "0"), strict=True):
        ellipse, box = (
            ffcp.FFCP(model, layer, joint=ways, seed=0).calibrate(x[1], y[1]).predict_interval(x[2])
            for ways in ("ellipsoid", True)
        )
        order = ellipse.prediction[:, 1].argsort()
        rows = order[[40, 2000, 3960]].tolist()
        ellipse.plot(y=y[2], rows=rows, ax=axis)
        for row in rows:
            (left, low), (right, high) = box.lower[row].tolist(), box.upper[row].tolist()
            edge = [left, right, right, left, left], [low, low, high, high, low]
            axis.plot(*edge, color="#6e7781", lw=0.8)
        ratio = float((ellipse.volume.log() - box.width.double().log().sum(dim=1)).mean().exp())
        name = "CP" if layer == "output" else "FFCP"
        axis.set(title=f"{name}: the ellipse has {ratio:.2f} of the box's area")
        axis.set(xlabel="change in 10 minutes, MW", ylabel="change in 20 minutes, MW")
    save(figure, "joint")


def stream() -> None:
    """Coverage over time, as ``ffcp-paper stream`` draws it."""
    from ffcp_paper.experiments import streams

    save(streams.picture([streams.run(name) for name in streams.NAMES]), "stream")


def forecasts() -> None:
    """Draw a week of forecasts of ``examples/forecast.py``, for the whole day and hour by hour."""
    example: Any = SimpleNamespace(**runpy.run_path(str(OUT.parents[1] / "examples/forecast.py")))
    torch.manual_seed(0)
    x, y, (train, cal, stream), spread = example.windows("metro_traffic")
    model = example.trained(x[train], y[train])
    joint = ffcp.CP(model, joint=True, support=(0, None))
    joint.fit_output_scales(x[train], y[train])
    each = ffcp.CP(model, support=(0, None))
    days = stream[(stream[6:] - stream[:-6] == 6 * 24).nonzero()[3, 0] :][:7]  # none is missing
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axis = figure.subplots()
    hours = torch.arange(7 * 24) / 24
    for predictor, colour, label in (
        (joint, "#b6d0f5", "joint: the whole day in 90 % of days"),
        (each, "#6ea0ea", "each hour in 90 % of days"),
    ):
        interval = predictor.calibrate(x[cal], y[cal]).predict_interval(x[days], alpha=0.1)
        ends = [(end * spread).flatten() / 1000 for end in (interval.lower, interval.upper)]
        axis.fill_between(hours, *ends, color=colour, lw=0, label=label)
    axis.plot(hours, (y[days] * spread).flatten() / 1000, color="black", lw=1.2, label="observed")
    axis.set(xlabel="days", ylabel="thousand vehicles an hour", xlim=(0, 7))
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    save(figure, "forecasts")


def tables() -> None:
    """Draw the top of the report of a fit, in a browser."""
    import pandas as pd
    from playwright.sync_api import sync_playwright

    from ffcp.tables import fit
    from ffcp_paper.data import datasets

    data = datasets.load("bike")
    frame = pd.DataFrame(data.x, columns=list(data.names)).assign(rentals=data.y)
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        fit(frame, "rentals", minutes=1.0, seed=0).save(f"{folder}/bike.ffcp")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 860})
        page.goto(f"file://{folder}/bike.ffcp/report.html")
        shrink(Image.open(io.BytesIO(page.screenshot())), "tables")
        browser.close()


def deploy() -> None:
    """How much wider the file's intervals are than the library's."""
    import onnxruntime

    torch.manual_seed(0)
    x = torch.randn(3000, 20)
    y = x[:, :3].sum(dim=1, keepdim=True) + torch.randn(3000, 1)
    layers = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    model = trained(nn.Sequential(*layers), x[:500], y[:500], nn.functional.mse_loss, 20)
    predictor = ffcp.FFCP(model, feature="2").calibrate(x[500:1000], y[500:1000])
    interval = predictor.predict_interval(x[1000:], alpha=0.1)
    with TemporaryDirectory() as folder:
        predictor.export(f"{folder}/intervals.onnx", x[500:1000])
        session = onnxruntime.InferenceSession(f"{folder}/intervals.onnx")
        lower, upper = session.run(["lower", "upper"], {"x": x[1000:].numpy()})
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    axis = figure.subplots()
    width = interval.width.double()
    sides = {
        "lower end": (interval.lower.double() - torch.from_numpy(lower)) / width,
        "upper end": (torch.from_numpy(upper) - interval.upper.double()) / width,
    }
    for name, beyond in sides.items():
        axis.hist(1e6 * beyond[:, 0].numpy(), bins=60, histtype="step", lw=1.5, label=name)
    axis.axvline(0, color="black", lw=0.9, ls="--")
    axis.set(xlabel="outside the library's interval, in millionths of its width", ylabel="rows")
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


def how_it_works() -> None:
    """Draw the five objects, and the way of the data when calibrating and predicting."""
    figure = Figure(figsize=(9, 4.3), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(0, 100), ylim=(0, 52))
    axis.axis("off")
    blue, green, grey = "#1f6feb", "#1a7f37", "#57606a"

    def box(x: float, y: float, wide: float, name: str, text: str, high: float = 9) -> None:
        edge = dict(boxstyle="round,pad=0.3", facecolor="#f6f8fa", edgecolor=grey)
        axis.add_patch(FancyBboxPatch((x, y), wide, high, **edge))
        axis.text(x + wide / 2, y + 0.68 * high, name, ha="center", va="center", weight="bold")
        place = {"ha": "center", "va": "center", "color": grey, "fontsize": 8.5}
        axis.text(x + wide / 2, y + 0.27 * high, text, **place)

    def arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        style = {"arrowstyle": "-|>", "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", end, start, arrowprops=style)

    frame = dict(boxstyle="round,pad=0.3", facecolor="none", edgecolor=grey, ls="--")
    axis.add_patch(FancyBboxPatch((16, 1), 66, 48.5, **frame))
    axis.text(17, 47.3, "Predictor", weight="bold", va="center")
    axis.text(28, 47.3, "a model, a score, a calibration, perhaps a selection", color=grey,
              va="center", fontsize=8.5)  # fmt: skip
    box(19, 14, 16, "BatchOutput", "output, gradient\nnorms, activations", 10)
    box(43, 36, 15, "Selection", "select(outputs, y)", 8)
    box(43, 21, 15, "Score", "score(out, y)")
    box(64, 21, 15, "Calibration", "fit(scores)")
    box(43, 4, 15, "Calibration", "quantile(alpha)")
    box(64, 4, 15, "Score", "region(out, q)")
    axis.text(7, 28, "calibration\nx, y", color=blue, ha="center", va="center")
    axis.text(7, 8, "new x", color=green, ha="center", va="center")
    axis.text(92, 8.5, "prediction\ninterval or set", color=green, ha="center", va="center")
    arrow((12, 26), (18.4, 21.5), blue)
    arrow((35.6, 21), (42.4, 25), blue)
    arrow((58.6, 25.5), (63.4, 25.5), blue)
    arrow((11, 9.5), (18.4, 16), green)
    arrow((35.6, 16.5), (42.4, 10), green)
    arrow((58.6, 8.5), (63.4, 8.5), green)
    axis.text(61, 10.2, "q", color=green, ha="center", va="center")
    arrow((79.6, 8.5), (85, 8.5), green)
    arrow((65, 20.4), (55, 13.6), grey)
    axis.text(63.5, 16.2, "sorted scores", color=grey, va="center", fontsize=8.5)
    arrow((28, 24.6), (42.4, 38.5), grey)
    axis.text(28.5, 36.5, "rows that then\ndo not calibrate", color=grey, ha="center", va="center",
              fontsize=8.5)  # fmt: skip
    arrow((50.5, 35.4), (50.5, 30.6), grey)
    arrow((58.6, 38), (68, 30.6), grey)
    axis.text(65.5, 36.2, "what was left open", color=grey, va="center", fontsize=8.5)
    save(figure, "how_it_works")


ALL = (
    *(
        how_it_works,
        regression,
        quantiles,
        classification,
        segmentation,
        groups,
        conditional,
        joint,
    ),
    *(stream, forecasts, tables, deploy, scale, risk, probabilities, selection),
)

if __name__ == "__main__":
    for draw in ALL:
        if len(sys.argv) == 1 or draw.__name__ in sys.argv[1:]:
            draw()
