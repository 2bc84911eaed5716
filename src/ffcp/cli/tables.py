"""The commands for tables: fit, predict, check, show."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from typer import Argument, Option

from ffcp.cli.printing import print_table, say
from ffcp.notebooks import number
from ffcp.progress import hidden

if TYPE_CHECKING:
    from ffcp.online.monitor import Monitor
    from ffcp.tables import FittedTable
    from ffcp.tables.evaluation import Measured

_SIGNIFICANCE = 0.01  # coverage with a smaller p-value is reported as too low
Folder = Annotated[Path, Argument(help="A folder written by ffcp fit.", show_default=False)]
Alpha = Annotated[float | None, Option(help="Allowed share of misses; by default the fit's, 0.1.")]
Level = Annotated[float | None, Option(help="Instead of --alpha: the coverage, 1 - alpha.")]


def fit(
    table: Annotated[Path, Argument(help="CSV, compressed or not, or Parquet.")],
    target: Annotated[str, Option(help="The column to predict.", show_default=False)],
    out: Annotated[Path | None, Option(help="The folder to write, by default TABLE.ffcp.")] = None,
    alpha: Alpha = None,
    confidence_level: Level = None,
    classify: Annotated[
        bool, Option("--classify", help="Treat a numeric target as class labels.")
    ] = False,
    group: Annotated[
        str | None, Option(help="A column of groups: the guarantee holds in each group.")
    ] = None,
    time: Annotated[
        str | None, Option(help="A column that orders rows: train on the past.")
    ] = None,
    support: Annotated[
        str | None, Option(help='Range of the target: "0," means >= 0, "0,1" from 0 to 1.')
    ] = None,
    side: Annotated[str, Option(help="Which ends: both, lower, upper or each.")] = "both",
    minutes: Annotated[
        float,
        Option(
            help="Time limit of the training. With a short limit fewer rows are used: the rest of "
            "the work takes about as long on one core, plus a few seconds and reading the file."
        ),
    ] = 3.0,
    seed: Annotated[int, Option(min=0, help="Seed of all random numbers.")] = 0,
    force: Annotated[bool, Option("--force", help="Replace an existing fit.")] = False,
) -> None:
    """Train a network on a table, calibrate its intervals, test them, and write a folder.

    Ctrl-C ends the training and keeps the best network so far. All automatic decisions are
    printed and stored in the folder; its **report.html** shows the test.
    """
    with _reported():
        from ffcp import tables
        from ffcp.tables import folder, table_io

        alpha = _requested(alpha, confidence_level)
        where = out or table.with_name(f"{table_io.base_name(table)}.ffcp")
        folder.must_be_free(where, force=force)
        folder.must_be_writable(where)
        with _progress("reading") as show_progress:
            fitted = tables.fit(
                table,
                target,
                alpha=alpha,
                classify=classify,
                group=group,
                time=time,
                side=side,
                support=_support(support),
                minutes=minutes,
                seed=seed,
                progress=show_progress,
            )
        fitted.save(where, force=force)
    _print_fit(fitted)
    say(f"Written: {where}; the report is {where / folder.REPORT}")


def predict(
    folder: Folder,
    tables: Annotated[list[Path], Argument(help="New rows, without the target.")],
    out: Annotated[
        Path | None,
        Option(
            help="The file to write, by default TABLE.intervals.csv, or TABLE.sets.csv for "
            "classes; with --ray a folder."
        ),
    ] = None,
    alpha: Alpha = None,
    confidence_level: Level = None,
    ray: Annotated[bool, Option("--ray", help="Distribute the tables over Ray workers.")] = False,
) -> None:
    """Write the rows of tables with their prediction and interval, or set of labels.

    Files larger than memory are read and written in parts. A row that cannot be predicted is
    written with empty cells and the reason.

    With **--ray** each table is predicted by one process of the cluster at RAY_ADDRESS, or of this
    machine. The folder, by default *intervals* or *sets* beside the first table, appears when all
    tables are written.
    """
    with _reported():
        from ffcp.tables import load

        alpha = _requested(alpha, confidence_level)
        fitted = load(folder)
        where = out or tables[0].with_name(fitted.kind)
        if ray:
            from ffcp.ray.tables import predict_files

            parts: Iterable[Any] = predict_files(fitted, tables, where, alpha)
            written = [where]
        else:
            written = _output_files(tables, out, fitted.kind)
            pairs = zip(tables, written, strict=True)
            parts = (part for pair in pairs for part in fitted.predict_file(*pair, alpha))
        rows = empty = 0
        remarks: dict[str, None] = {}
        with _progress("predicting") as show_progress:
            for part in parts:
                rows, empty = rows + part.rows, empty + part.empty
                remarks.update(dict.fromkeys(part.remarks))
                show_progress(f"predicted {rows:,} rows", None)
    for remark in remarks:
        say(f"Note: {remark}")
    if empty:
        say(f"{empty:,} row(s) could not be predicted: see the column 'reason'")
    say(f"Written: {', '.join(map(str, written))}, {rows:,} rows")


def _output_files(tables: list[Path], out: Path | None, kind: str) -> list[Path]:
    """Return the output file of each table; raise if it is the table itself or used twice."""
    from ffcp.tables import TableError, table_io

    if out is not None and len(tables) > 1:
        raise TableError("--out names one file, but there are several tables: leave it out")
    table_of: dict[Path, Path] = {}
    for table in tables:
        ending = ".parquet" if table_io.is_parquet(table) else ".csv"
        file = out or table.with_name(f"{table_io.base_name(table)}.{kind}{ending}")
        if file.resolve() == table.resolve():
            raise TableError(f"--out {out} is the table itself: name another file")
        if file in table_of:
            raise TableError(
                f"{table_of[file]} and {table} would both be written to {file}: predict them one "
                "by one, with --out"
            )
        table_of[file] = table
    return list(table_of)


def _requested(alpha: float | None, confidence_level: float | None) -> Any:
    """Return the requested alpha as an exact fraction, or ``None``."""
    from ffcp.conformal.rank import requested_alpha

    if alpha is None and confidence_level is None:
        return None
    if alpha is not None and confidence_level is not None:
        raise typer.BadParameter("pass --alpha or --confidence-level, not both")
    return requested_alpha(alpha, confidence_level)


def check(
    folder: Folder,
    table: Annotated[Path, Argument(help="Rows with their target.")],
    alpha: Alpha = None,
    confidence_level: Level = None,
    group: Annotated[str | None, Option(help="A column of groups to report by.")] = None,
    time: Annotated[str | None, Option(help="A column that orders rows, to detect drift.")] = None,
) -> None:
    """Measure coverage on rows whose target is known, overall and by groups.

    Use new rows: a note is printed if most of them were part of the fit.

    Also tests for drift, which can occur while the intervals still cover. Exits with code 1 if
    coverage is significantly too low.
    """
    with _reported():
        from ffcp import tables
        from ffcp.tables import fit_rows, table_io

        alpha = _requested(alpha, confidence_level)
        fitted, frame = tables.load(folder), table_io.read(table)
        measured = fitted.check(frame, alpha, group)
        monitor = fitted.watch(frame, alpha, time)
        p_value = fitted.still_covers(measured, alpha)
    say(f"Calibrated with {fitted.calibrated:,} rows")
    _print_measured(measured, bool(fitted.about.classes), columns=True)
    _print_watched(monitor, fitted, time)
    if p_value < _SIGNIFICANCE:
        say(f"Coverage is significantly too low (p = {p_value:.2g}): fit again, with newer rows.")
        raise typer.Exit(1)
    if measured.seen < fit_rows.MOST_OF_THEM:
        say(f"Coverage is as guaranteed, up to chance: {fitted.calibrated:,} rows calibrated.")
    else:
        say("These rows are covered, but most were part of the fit: check with new rows.")


def show(folder: Folder) -> None:
    """Print a fit's columns, sizes, guarantee and test results."""
    with _reported():
        from ffcp import tables

        fitted = tables.load(folder)
    rows = [(column.name, column.kind, column.why) for column in fitted.columns[0]]
    print_table(None, ("column", "kind", "why"), rows)
    _print_fit(fitted)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Print warnings as notes, and an error as one sentence, followed by exit code 2."""
    from ffcp.warnings import FFCPWarning

    with warnings.catch_warnings(record=True) as remarks:
        warnings.simplefilter("always", FFCPWarning)
        try:
            yield
        except (ValueError, OSError) as error:
            name = getattr(error, "filename", None)
            reason = getattr(error, "strerror", None)
            text = f"{reason}: {name}" if reason and name else reason or error
            typer.echo(f"Error: {text}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("Stopped: nothing was written.", err=True)
            raise typer.Exit(130) from None
    notes = [str(remark.message) for remark in remarks if issubclass(remark.category, FFCPWarning)]
    for note in dict.fromkeys(notes):
        say(f"Note: {note}")


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Any]:
    """Show a progress bar; yields a function of the current step's text and the share done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Nothing is written to a file, not even an empty line.
    bar = Progress(*columns, transient=True, disable=not Console().is_terminal)
    with hidden(), bar as progress:
        task = progress.add_task(what, total=None)
        yield lambda step, share: progress.update(
            task, description=step, completed=share, total=None if share is None else 1.0
        )


def _support(text: str | None) -> tuple[float | None, float | None]:
    """Return the ends of a range: ``"0,"`` means >= 0.

    >>> _support("0,"), _support(",1"), _support("0,1")
    ((0.0, None), (None, 1.0), (0.0, 1.0))
    """
    if text is None:
        return None, None
    ends = [end.strip() for end in text.split(",")]
    try:
        low, high = (float(end) if end else None for end in ends)
    except ValueError as error:
        raise ValueError(
            f'--support: expected a range like "0,", ",1" or "0,1", got {text!r}'
        ) from error
    return low, high


def _print_fit(fitted: FittedTable) -> None:
    """Print a fit's target, decisions, rows, guarantee and test results."""
    from ffcp.tables.training import training_summary

    about = fitted.about
    values = f"{len(about.classes)} classes" if about.classes else "numbers"
    used = len(fitted.columns[0].used)
    columns = "1 column" if used == 1 else f"{used} columns"
    say(f"Target {about.target!r}: {values}, from {columns} of {about.source}")
    for decision in about.decisions:
        say(f"Decided: {decision}")
    say("Rows: " + ", ".join(f"{count:,} for {name}" for name, count in about.rows.items()))
    say(f"Training: {training_summary(about.training)}")
    say("Method:" + ("\n" if "\n" in about.method else " ") + about.method)
    say(f"Guarantee: {about.guarantee}")
    if about.tested is not None:
        _print_measured(about.tested, bool(about.classes))


def _print_measured(measured: Measured, labels: bool, columns: bool = False) -> None:
    """Print coverage and size, overall and by groups, and the columns with the lowest coverage."""
    length = "mean size" if labels else "mean length"
    size = "" if measured.size is None else f", {length} {number(measured.size)}"
    score = "" if measured.score is None else f", interval score {number(measured.score)}"
    share = f"{measured.coverage:.1%} [{measured.low:.1%}, {measured.high:.1%}]"
    say(f"Coverage {share} of {measured.rows:,} rows{size}{score}")
    if measured.excess is not None:
        say(f"Coverage by columns: {_depends(*measured.excess)}")
    if measured.infinite:
        say(f"{measured.infinite:,} of the intervals are infinite")
    if measured.without:
        say(f"{measured.without:,} rows could not be predicted")
    worst = sorted(measured.columns, key=lambda part: part.coverage)[:5] if columns else ()
    for title, parts in (("By group", measured.groups), ("Lowest coverage", worst)):
        rows = []
        for part in parts:
            coverage, interval = f"{part.coverage:.1%}", f"{part.low:.1%} to {part.high:.1%}"
            no_size = "infinite" if measured.infinite else ""  # of one-sided intervals
            size = no_size if part.size is None else number(part.size)
            rows.append((part.column, part.value, f"{part.rows:,}", coverage, interval, size))
        if rows:
            print_table(title, ("column", "value", "rows", "coverage", "interval", length), rows)


def _depends(value: float, low: float, high: float) -> str:
    """Return a summary of how far coverage depends on the columns, by its excess risk.

    >>> _depends(0.01, 0.005, 0.015)
    'differs by about 10 % between rows (excess risk 0.0100 [0.0050, 0.0150])'
    >>> _depends(-0.001, -0.002, 0.0)
    'no difference between rows found (excess risk -0.0010 [-0.0020, 0.0000])'
    """
    summary = "no difference between rows found"
    if low > 0:
        summary = f"differs by about {100 * math.sqrt(max(value, 0.0)):.0f} % between rows"
    return f"{summary} (excess risk {value:.4f} [{low:.4f}, {high:.4f}])"


def _print_watched(monitor: Monitor | None, fitted: FittedTable, time: str | None) -> None:
    """Print whether drift was detected, and the tests."""
    from ffcp.online.monitor import COLUMNS, TARGET, cell

    if monitor is None:
        why = "a fit by folds keeps no scores" if fitted.about.folds else "pass --time COLUMN"
        say(f"Not tested for drift: {why}.")
        return
    table, drift, order, bound = monitor.table(), monitor.alarm, f"order of {time!r}", 2
    if time is None:  # rows in random order are compared with calibration, not with one another
        table, drift = table[:1], monitor.alarms[TARGET] is not None
        order, bound = "random order", 1
    rows = [[cell(value) for value in row.values()] for row in table]
    title = f"Drift tests ({monitor.rows:,} rows in {order})"
    print_table(title, table[0], rows)
    say(COLUMNS.strip())
    odds = f"the probability of a false alarm is at most {bound / monitor.threshold:.2g}"
    say(f"Drift detected: {odds}." if drift else "No drift detected.")
