"""What all predictors share: a model, a calibration, and how the calibration is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ffcp import files
from ffcp.quantiles import ScoreStore

Self = TypeVar("Self", bound="Calibrated")


class Calibrated(nn.Module):
    """A model with calibration scores, which ``state_dict`` and :meth:`save` carry.

    The scores go with the settings they were made with; settings that differ are refused.
    """

    calibration: ScoreStore

    def __init__(self, model: nn.Module, batch_size: int | None = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.batch_size = batch_size
        self.calibration = ScoreStore()

    def _settings(self) -> dict[str, Any]:
        """Everything, the model apart, that a score depends on."""
        return {"method": type(self).__name__}

    def _remembered(self) -> dict[str, Any]:
        """Give what is saved with the settings though no score depends on it."""
        return {}

    def _must_be_calibrated(self) -> None:
        if not len(self.calibration):
            raise RuntimeError(
                f"this {type(self).__name__} has no calibration: call calibrate(x, y) first, with "
                "points that did not train the model"
            )

    def _must_match(self, settings: Mapping[str, Any], whose: str) -> None:
        mine = self._settings()
        differing = [key for key in mine if mine[key] != settings.get(key)]
        if differing:
            listed = ", ".join(f"{k}={settings.get(k)!r} (here {mine[k]!r})" for k in differing)
            raise ValueError(
                f"{whose} has other settings, so its scores mean another thing: {listed}"
            )

    def get_extra_state(self) -> Tensor:
        """Pack the settings for ``state_dict``, as a tensor so that any format can hold it."""
        return files.pack({**self._settings(), **self._remembered()})

    def set_extra_state(self, state: Tensor) -> None:
        """Check that a loaded calibration was made with this predictor's settings."""
        self._must_match(files.unpack(state), "the loaded calibration")

    def save(self, path: str | Path) -> None:
        """Write the calibration, without the model's weights, to a safetensors file.

        The file is written whole or not at all.
        """
        own = {k: v for k, v in self.state_dict().items() if not k.startswith("model.")}
        files.write(path, own, fingerprint=files.fingerprint(self.model))

    def load(self: Self, path: str | Path) -> Self:
        """Read a calibration written by :meth:`save`; nothing is unpickled.

        The model must have the very weights it was calibrated with.
        """
        state, fingerprint = files.read(path)
        if fingerprint != files.fingerprint(self.model):
            raise ValueError(
                f"{path} was calibrated with other weights than this model has, and would not "
                "cover: load those weights, or calibrate again"
            )
        self.load_state_dict({**self.state_dict(), **state})
        return self

    def extra_repr(self) -> str:
        """Show the settings, and how many points calibrate."""
        shown = {k: v for k, v in self._settings().items() if k != "method"}
        listed = ", ".join(f"{key}={value!r}" for key, value in shown.items())
        return f"{listed}, calibrated on {len(self.calibration)} points"
