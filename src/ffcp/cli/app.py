"""The command line application ``ffcp``, and its command ``demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import ffcp
from ffcp.cli import tables
from ffcp.cli.printing import print_table, say

app = typer.Typer(
    help="""Prediction intervals with guaranteed coverage for your PyTorch network.

    Start with **ffcp demo**: it needs no data and shows what the library does. If you have a
    table, **ffcp fit** trains a network and calibrates its prediction intervals. In a program,
    *import ffcp* and calibrate your own network.""",
    epilog="A separate command, ffcp-paper, reproduces the paper's tables and figures.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # lines of a paragraph are joined; brackets stay
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"ffcp {ffcp.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="File for the plot of the intervals: .png, .pdf or .svg.")
    ] = Path("ffcp_demo.png"),
    alpha: Annotated[
        float, typer.Option(help="Allowed share of misses; 0.1 means 90 % coverage.")
    ] = 0.1,
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs for each network.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of the data, network and selection.")] = 0,
) -> None:
    """Train a small network on two data sets and compare CP with FFCP.

    Downloads nothing and takes about half a minute.

    Prints a table for each data set, with coverage, mean length, the worst group's coverage and
    the seconds for calibration and prediction, and plots the prediction intervals.
    """
    if not 0 < alpha < 1:
        raise typer.BadParameter(f"{alpha} does not lie between 0 and 1", param_hint="--alpha")
    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise typer.BadParameter(f"{out} must end in .png, .pdf or .svg", param_hint="--out")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    # Imported here: the help and the version should not wait for matplotlib.
    from ffcp.cli import demo as demonstration

    torch.set_num_threads(1)  # faster for layers this small
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        for data in demonstration.DATA_SETS:
            progress.add_task(f"training on {data.name}", total=epochs)

            def advance() -> None:
                progress.advance(progress.task_ids[-1])

            results.append(
                demonstration.run(data, epochs=epochs, alpha=alpha, seed=seed, progress=advance)
            )
    for result in results:
        say(f"\n{result.data.name}: {result.data.about}")
        print_table(None, demonstration.COLUMNS, [row.cells() for row in result.rows])
        Console().print(result.verdict(), highlight=False)
    demonstration.picture(results).savefig(out, dpi=150)
    say(f"Plot of the intervals: {out}")


for command in (tables.fit, tables.predict, tables.check, tables.show):
    app.command()(command)
