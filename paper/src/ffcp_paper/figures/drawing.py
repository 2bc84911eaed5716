"""Inputs and style that all figures share.

Figures are legible in greyscale too: markers, line styles and hatches differ, not only colours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from ffcp_paper.data.datasets import Split
from ffcp_paper.experiments.studies import Study, available
from ffcp_paper.experiments.tasks import TRAINED, Report, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPLIT = 2  # where the paper's histograms and our overview take the gradient
_WIDE = 9.0  # inches; at 900 px a point of type is 1.4 px
DARK, GREY, LIGHT = "#1a1a1a", "#8c8c8c", "#d9d9d9"
TRAINED_SHARE = 0.9  # of the time of a figure, if its network has to be trained


@dataclass(frozen=True)
class Request:
    """Inputs of a figure.

    Parameters
    ----------
    settings
        Size of the run, as for the tables.
    data
        The data set of the figures about scores; see :func:`default_data`.
    seed
        Seed of the split and of the network.
    alpha
        Miscoverage level.
    report
        Called with the completed share of a figure and a description.
    """

    settings: Settings = field(default_factory=Settings)
    data: str = "synthetic"
    seed: int = 0
    alpha: float = 0.1
    report: Report = lambda share, text: None

    def trained(self) -> tuple[nn.Module, Split]:
        """Return the network and the rows that the tables use, cached if possible."""
        # Networks are cached by seed: those of the tables are used.
        study = Study(
            self.data,
            replace(self.settings, seeds=self.seed + 1),
            lambda share, text: self.report(TRAINED_SHARE * share, text),
        )
        return study.models(TRAINED)[self.seed], study.parts(self.seed)


@dataclass(frozen=True)
class Drawn:
    """A figure with its title, caption and alternative text."""

    figure: Figure
    title: str
    caption: str
    alt: str


def default_data(settings: Settings) -> str:
    """Return the data set of the figures: bike if its file is present, else synthetic.

    >>> default_data(Settings(only=("synthetic",)))
    'synthetic'
    """
    wanted = ("bike", "synthetic", *(settings.only or ()))
    allowed = [name for name in wanted if settings.only is None or name in settings.only]
    return next((name for name in allowed if available(name)), "synthetic")


def canvas(height: float) -> Figure:
    """Return an empty figure of the usual width and a height in inches."""
    # The object-oriented interface: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDE, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def without_frame(axis: Axes) -> None:
    """Hide the upper and right border of the axes."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)


def share_text(share: float) -> str:
    """Write a share as a percentage.

    >>> share_text(0.9)
    '90.0 %'
    """
    return f"{100 * share:.1f} %"


def level_text(alpha: float) -> str:
    """Write the level of a band.

    >>> level_text(0.1), level_text(0.025)
    ('90 %', '97.5 %')
    """
    return f"{100 * (1 - alpha):g} %"
