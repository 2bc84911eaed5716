"""The ``ffcp-paper`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

import ffcp
import ffcp_paper
from ffcp_paper import reproduce as reproduction
from ffcp_paper.console import print_table, progress_bar
from ffcp_paper.data import datasets, fetch, inventory
from ffcp_paper.data.download import FetchError
from ffcp_paper.data.files import MissingDataError
from ffcp_paper.experiments import group_coverage as worst_groups
from ffcp_paper.experiments import logits, segmentation, streams
from ffcp_paper.experiments import prediction_sets as label_sets
from ffcp_paper.ffcp_internals import KERNELS
from ffcp_paper.figures import paper_figures, segmentation_maps
from ffcp_paper.networks import pretrained
from ffcp_paper.networks.regression import mlp
from ffcp_paper.page import report as page
from ffcp_paper.tables import render

app = typer.Typer(
    help="""The paper on Fast Feature Conformal Prediction: its tables and figures, reproduced.

    **ffcp-paper reproduce --quick** tries all of it in a minute or two. Data files are looked for
    in the folder that FFCP_DATA names; **ffcp-paper data** lists which are present.""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a paragraph are joined; brackets stay
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ffcp-paper {ffcp_paper.__version__}, ffcp {ffcp.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the versions.")
    ] = False,
) -> None:
    pass


@app.command()
def groups(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Data sets, by default {', '.join(worst_groups.NAMES)}."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of splits and networks.")] = 1,
    kernel: Annotated[str, typer.Option(help=f"One of {', '.join(KERNELS)}.")] = "nearest",
    on: Annotated[
        str, typer.Option(help="Space of the distances: prediction, input, or a layer 0, 3, 6.")
    ] = "prediction",
    guarantee: Annotated[
        str, typer.Option(help="Of the localized methods: marginal, random or none.")
    ] = "marginal",
    alpha: Annotated[float, typer.Option(help="Miscoverage level.")] = 0.1,
    epochs: Annotated[int, typer.Option(min=1, help="Most training epochs.")] = 1000,
) -> None:
    """Compare the worst group's coverage of CP, FFCP, LCP and FFLCP on real data.

    Groups are the thirds of y. Networks and results are kept: a second call, or one after an
    interruption, computes only what is missing.
    """
    settings = _group_settings(kernel, on, guarantee, alpha, epochs)
    console = Console()
    torch.set_num_threads(1)  # layers this small only lose time by being divided
    chosen = _present(console, names or list(worst_groups.NAMES))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with progress_bar(console, *columns) as progress:
        whole = progress.add_task("all runs", total=len(chosen) * seeds)
        for name in chosen:
            results = []
            for seed in range(seeds):
                # The search for the number of epochs, then as many at most again.
                task = progress.add_task(f"training on {name}, seed {seed}", total=2 * epochs)
                results.append(
                    worst_groups.run(
                        name,
                        seed,
                        settings,
                        progress=lambda task=task: progress.advance(task),  # type: ignore[misc]
                    )
                )
                progress.remove_task(task)
                progress.advance(whole)
            _print_groups(console, name, results)


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise typer.BadParameter(
            f"must lie strictly between 0 and 1, got {alpha}", param_hint="--alpha"
        )


def _group_settings(
    kernel: str, on: str, guarantee: str, alpha: float, epochs: int
) -> worst_groups.Settings:
    """Return the settings; raise on those that would fail only after the training."""
    _check_alpha(alpha)
    try:
        ffcp.LCP(mlp(1), ffcp.kernels.Localizer(kernel, on), guarantee=guarantee)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return worst_groups.Settings(kernel, on, guarantee, alpha, epochs)


def _present(console: Console, names: list[str]) -> list[str]:
    """Return the data sets whose files are present; print what the others need."""
    unknown = [name for name in names if name not in datasets.DATASETS]
    if unknown:
        listed = ", ".join(datasets.DATASETS)
        raise typer.BadParameter(f"unknown data set {unknown[0]!r}: choose from {listed}")
    present = []
    for name in dict.fromkeys(names):
        missing = datasets.DATASETS[name].missing
        for file in missing:
            try:
                file.require()
            except MissingDataError as error:
                console.print(f"{name}: {error}", highlight=False, soft_wrap=True, markup=False)
        if not missing:
            present.append(name)
    if not present:
        raise typer.Exit(1)
    return present


def _print_groups(console: Console, name: str, results: list[list[worst_groups.Result]]) -> None:
    console.print(f"\n[bold]{name}[/bold]: {datasets.DATASETS[name].about}", highlight=False)
    print_table(console, worst_groups.COLUMNS, worst_groups.tabulate(results))
    console.print(worst_groups.verdict(results), highlight=False)


@app.command()
def labels(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Networks, by default all: {', '.join(pretrained.NETWORKS)}; or digits."
        ),
    ] = None,
    splits: Annotated[
        int, typer.Option(min=1, help="Random splits into calibration and test.")
    ] = 20,
    alpha: Annotated[float, typer.Option(help="Miscoverage level.")] = 0.1,
) -> None:
    """Compare RAPS with FFRAPS on pretrained networks and real images.

    Logits and results are kept: a second call, or one after an interruption, computes only what
    is missing. Without the images, a small network on scikit-learn's digits is the example.
    """
    _check_alpha(alpha)
    console = Console()
    chosen = _networks(console, names or list(pretrained.NETWORKS))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with progress_bar(console, *columns) as progress:
        whole = progress.add_task("all networks", total=len(chosen))
        for name in chosen:
            task = progress.add_task(f"images through {name}", total=None)
            result = label_sets.outputs(
                name,
                lambda done, total, task=task: progress.update(  # type: ignore[misc]
                    task, completed=done, total=total
                ),
            )
            progress.update(task, description=f"splits of {name}", completed=0, total=splits)
            results = label_sets.run(
                name,
                splits,
                alpha,
                result,
                lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
            progress.remove_task(task)
            progress.advance(whole)
            _print_labels(console, result, results, alpha)


def _networks(console: Console, names: list[str]) -> list[str]:
    """Return the networks whose files are present, or the digits; print what the others need."""
    known = [*pretrained.NETWORKS, label_sets.DIGITS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown network {unknown[0]!r}: choose from {', '.join(known)}")
    present, messages = [], set()
    for name in dict.fromkeys(names):
        missing = [] if name == label_sets.DIGITS else logits.missing(pretrained.NETWORKS[name])
        if not missing:
            present.append(name)
        for file in missing:
            try:
                file.require()
            except MissingDataError as error:
                if str(error) not in messages:
                    console.print(str(error), highlight=False, soft_wrap=True, markup=False)
                messages.add(str(error))
    if not present:
        console.print("\nShowing the example that needs no data.", highlight=False)
        return [label_sets.DIGITS]
    return present


def _print_labels(
    console: Console,
    result: label_sets.Outputs,
    results: list[list[label_sets.Result]],
    alpha: float,
) -> None:
    console.print(
        f"\n[bold]{result.title}[/bold]: {len(result.labels):,} images, top-1 {result.top1:.1%}, "
        f"top-5 {result.top5:.1%}",
        highlight=False,
    )
    print_table(console, label_sets.COLUMNS, label_sets.tabulate(results))
    if result.top1 > 1 - alpha:
        console.print(
            "Top-1 is above 1 - alpha: one label is nearly always enough. Compare with a smaller "
            "--alpha.",
            highlight=False,
        )


@app.command()
def segment(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Networks, of {', '.join(segmentation.EXPERIMENTS)}. [default: shapes]"
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Miscoverage level.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the split into calibration and test.")] = 0,
    images: Annotated[int, typer.Option(min=1, max=20, help="Images in the picture.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("."),
) -> None:
    """Compare bands for every pixel and class of segmented images: CP, FCP and FFCP.

    shapes needs no data and takes about two minutes. camvid trains a network on road scenes first
    (at most 25 minutes, once); deeplab was trained on other roads. Both need data files.

    Prints coverage, band length on object boundaries and inside, seconds, and the label sets of
    every pixel; draws image, label, prediction and the maps of band length. What is finished is
    kept: a second call, or one after an interruption, computes only what is missing.
    """
    _check_alpha(alpha)
    if not out.is_dir():
        raise typer.BadParameter(f"there is no folder {out}", param_hint="--out")
    console = Console()
    for name in _segmentations(console, names or ["shapes"]):
        with console.status(f"{name}: starting") as status:
            result = segmentation.run(
                name,
                alpha=alpha,
                seed=seed,
                drawn=images,
                progress=lambda line, name=name: status.update(f"{name}: {line}"),  # type: ignore[misc]
            )
        segmentation_maps.report(console, result)
        place = out / f"ffcp_segment_{name}.png"
        segmentation_maps.picture(result).savefig(place, dpi=130)
        console.print(f"Picture: {place}", highlight=False, soft_wrap=True)


def _segmentations(console: Console, names: list[str]) -> list[str]:
    """Return the networks whose files are present; print what the others need."""
    known = segmentation.EXPERIMENTS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown network {unknown[0]!r}: choose from {', '.join(known)}")
    present = []
    for name in dict.fromkeys(names):
        try:
            for file in segmentation.FILES[name]:
                file.require()
        except MissingDataError as error:
            console.print(f"{name}: {error}", highlight=False, soft_wrap=True, markup=False)
        else:
            present.append(name)
    if not present:
        console.print("ffcp-paper segment shapes needs no data.", highlight=False)
        raise typer.Exit(1)
    return present


@app.command()
def stream(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Series, of {', '.join(streams.NAMES)}. [default: those whose files are present]"
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Miscoverage level.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed of the network and of synthetic data.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("."),
) -> None:
    """Run CP, FFCP and ffcp.Online on time series, and report when ffcp.Monitor warns.

    break is synthetic, with two change points, and needs no data; bike are hourly rentals. Prints
    coverage, and draws it over time. Takes about a minute.
    """
    _check_alpha(alpha)
    if not out.is_dir():
        raise typer.BadParameter(f"there is no folder {out}", param_hint="--out")
    unknown = [name for name in names or () if name not in streams.NAMES]
    if unknown:
        raise typer.BadParameter(f"unknown series {unknown[0]!r}: choose from {streams.NAMES}")
    console, results = Console(), []
    torch.set_num_threads(1)
    for name in names or streams.NAMES:
        if name in datasets.DATASETS and not _present(console, [name]):
            continue
        with console.status(f"{name}: starting") as status:
            results.append(
                streams.run(
                    name,
                    alpha,
                    seed,
                    progress=lambda line, name=name: status.update(f"{name}: {line}"),  # type: ignore[misc]
                )
            )
        result = results[-1]
        columns = ["method", "coverage", f"worst {streams.LOCAL} rows", "median length", "infinite"]
        console.print(f"{name}, {len(result.tracked['CP'].hits)} rows", highlight=False)
        print_table(console, columns, streams.rows_of(result))
        alarms = ", ".join(f"{k} {v}" for k, v in result.alarms.items() if v is not None)
        console.print(f"Monitor, first alarm at row: {alarms or 'none'}", highlight=False)
        areas = ", ".join(f"{k} {v:.2f}" for k, v in result.novelty.items())
        console.print(f"Drifted rows against calibration, area under ROC: {areas}", highlight=False)
    if results:
        place = out / "ffcp_stream.png"
        streams.picture(results).savefig(place, dpi=130)
        console.print(f"Picture: {place}", highlight=False, soft_wrap=True)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Tables and figures, by default all: {', '.join(reproduction.NAMES)}."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Splits and networks. [default: 5, or 2 if quick]")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small data and short training: does all of it work?")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for tables and figures.")] = Path("reproduced"),
) -> None:
    """Make the paper's tables, its numbers and ours side by side, and its figures.

    Without names all of them: a minute or two with --quick, an hour with all data.
    Every table says whether the paper's claim holds here. Data sets that are missing are shown as
    not available. What is finished is kept: a second call, or one after an interruption, computes
    only what is missing.
    """
    try:
        reproduction.check_names(names or [])
        for name in names or []:
            for file in paper_figures.missing(name):
                file.require()
    except (ValueError, MissingDataError) as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with progress_bar(console, *columns) as progress:
        task = progress.add_task("starting", total=None)
        reproduction.run(
            names or (),
            seeds,
            quick,
            out,
            lambda done, total, text: progress.update(
                task, completed=done, total=total, description=text
            ),
            finished=lambda table: console.print(
                f"\n{render.to_text(table, min(console.width, 120))}",
                highlight=False, markup=False, soft_wrap=True,
            ),
        )  # fmt: skip
    console.print(
        f"\nTables and figures: {out}. One page of them: ffcp-paper report {out}",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Results: tables, figures and settings.json.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page. [default: FOLDER/report.html]")
    ] = None,
) -> None:
    """Write one page of results that needs no network: claims, tables, figures, settings."""
    try:
        place = page.write(folder, out)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    Console().print(f"Page: {place}", highlight=False, soft_wrap=True)


data_app = typer.Typer(help="The paper's data sets: list and fetch them.", add_completion=False)
app.add_typer(data_app, name="data")


@data_app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """List the paper's data sets: which are present, and what to do about the others."""
    if context.invoked_subcommand:
        return
    console = Console()
    entries = inventory.entries()
    print_table(console, inventory.COLUMNS, inventory.tabulate(entries))
    for line in inventory.advice(entries):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


@data_app.command("fetch")
def data_fetch(
    names: Annotated[list[str], typer.Argument(help="Data sets, as ffcp-paper data lists them.")],
    unverified: Annotated[
        bool,
        typer.Option("--unverified", help="Take files whose checksum is not known; else refused."),
    ] = False,
) -> None:
    """Download data sets from their official sources.

    Every file is compared with its checksum and gets its name only if that is right.
    """
    console = Console()
    unknown = [name for name in names if name not in datasets.DATASETS]
    if unknown:
        listed = ", ".join(datasets.DATASETS)
        raise typer.BadParameter(f"unknown data set {unknown[0]!r}: choose from {listed}")
    failed = False
    for name in dict.fromkeys(names):
        terms = fetch.terms(name)
        if terms:
            console.print(f"{name}: terms of use at {terms}", highlight=False, soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with progress_bar(console, *columns) as progress:
            task = progress.add_task(f"fetching {name}", total=None)
            try:
                places = fetch.fetch(
                    name,
                    lambda done, total, task=task: progress.update(  # type: ignore[misc]
                        task, completed=done, total=total
                    ),
                    unverified=unverified,
                )
            except FetchError as error:
                failed = True
                lines = [f"{name}: {error}"]
            else:
                lines = [f"{name}: {place}" for place in places] or [f"{name}: nothing to fetch"]
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    if failed:
        raise typer.Exit(1)


def main() -> None:
    """Run the command; Ctrl-C ends it without a traceback."""
    app()
