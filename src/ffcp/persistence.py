"""Saving and loading: a file holds class names, configs, states, a checksum and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ffcp import files
from ffcp.calibrated import Calibrated, Counts, Stateful
from ffcp.calibration_loop import selections_of
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import prefixed, with_prefix
from ffcp.conformal.compressed import is_summary, uncompressed
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.random_numbers import Stream
from ffcp.conformal.selection import Selection
from ffcp.description import (
    Described,
    build,
    class_named,
    describe,
    differences,
    is_default,
    own_objects,
    shown,
)
from ffcp.locks import WriterLock
from ffcp.network.features import resolve
from ffcp.network.model import Identity, checked_autocast, fingerprint
from ffcp.notebooks import ShownAsTable, ShownAsText, wrapped

Self = TypeVar("Self", bound="Persistent")
_PARTS = ("score.", "calibration.")  # of a state_dict, besides the model
_OPEN = (None, "auto", "fit")  # arguments that are left to be selected


class Persistent(ShownAsText, Stateful, Described):
    """A model, a score and a calibration that can be saved, loaded and copied."""

    #: Arguments that scores depend on, besides score and calibration.
    compared: tuple[str, ...] = ("output",)
    seed: int | None
    _given: tuple[Any, Calibration]  # as given, before anything is selected
    _fitted: Mapping[str, Any]  # what was selected before calibrating, on other rows
    _stream: Stream
    _lock: WriterLock  # held while the next state is made

    # -- without scores ---------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be selected when this predictor is calibrated."""
        return not selections_of(*self._given)

    def settled(self: Self, seed: int | None = None) -> Self:
        """Return a predictor of the same model without scores, with nothing left to select.

        What was selected or learned here stays: workers can calibrate copies of it on their own
        rows, and be merged. ``seed`` is that of its random numbers; each worker needs its own. By
        default the operating system seeds them.

        Parameters
        ----------
        seed : int, default=None
            Seed of its random numbers.
        """
        return self._without_scores(self._state.score, self.calibration, self._state.report, seed)

    def uncalibrated(self: Self, seed: int | None = None) -> Self:
        """Return this predictor as it was before it was calibrated."""
        return self._without_scores(*self._given, self._fitted, seed)

    def _without_scores(
        self: Self, score: Any, calibration: Calibration, report: Any, seed: int | None
    ) -> Self:
        empty = calibration.with_state({})
        return self.snapshot(
            seed=seed,
            _given=(score, empty),
            _fitted=report,
            _state=Calibrated(score, empty, None, self._state.layout, report),
            _lock=WriterLock(),
            _stream=Stream(seed),
        )

    # -- one description --------------------------------------------------------------------

    def comparable(self) -> dict[str, Any]:
        """Return what scores depend on, in plain data: equal for predictors that can be merged."""
        return self._comparable(self._state.score, self.calibration)

    def _comparable(self, score: Any, calibration: Calibration) -> dict[str, Any]:
        config, described = self.config(), describe(score, self.model)
        learned = {} if isinstance(score, Selection) else score.state()
        return {
            "score": described,
            "learned": learned_hash(described, learned) if learned else None,
            "calibration": describe(uncompressed(calibration), self.model),
            **{name: describe(config.get(name), self.model) for name in self.compared},
        }

    def get_extra_state(self) -> Tensor:
        """Return the description, as a tensor so that any format can hold it.

        It comes with a checksum over itself and over all tensors of the state.
        """
        state = self._state
        saved = {
            "format": files.FORMAT,
            "predictor": describe(self, self.model),
            "compared": self.comparable(),
            "calibration": describe(state.calibration, self.model),
            "shapes": _shapes(self.tensors()),
            "fingerprint": state.fingerprint,
            "autocast": "" if state.identity is None else state.identity.autocast,
            "layout": state.layout,
            "report": {name: _plain_report(report) for name, report in state.report.items()},
            "set_aside": state.set_aside,
            "runs": list(state.runs),
            "counts": asdict(state.counts),
        }
        return files.seal(saved, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of score and calibration."""
        score = {} if isinstance(self._state.score, Selection) else self._state.score.state()
        return prefixed("score.", score) | prefixed("calibration.", self.calibration.state())

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: the state was loaded as a whole."""

    def state(self) -> dict[str, Tensor]:
        """Return the calibration as tensors, without the model's weights: what a file holds."""
        snapshot = self.snapshot()
        return {"_extra_state": snapshot.get_extra_state(), **snapshot.tensors()}

    def restored(self: Self, state: Mapping[str, Tensor], strict: bool = True) -> Self:
        """Return this predictor with the calibration of a :meth:`state`, once all is checked."""
        unexpected = [n for n in state if n != "_extra_state" and not n.startswith(_PARTS)]
        if strict and unexpected:
            raise ValueError(f"it does not fit a {type(self).__name__}: {', '.join(unexpected)}")
        if "_extra_state" not in state:
            raise ValueError("its description is missing")
        tensors = {name: tensor for name, tensor in state.items() if name.startswith(_PARTS)}
        saved = files.unseal(state["_extra_state"], tensors)
        if saved.get("format") != files.FORMAT:
            raise ValueError("it was saved by another version of ffcp: calibrate again")
        if saved["shapes"] != _shapes(tensors):
            raise ValueError("its tensors have other types or shapes than were saved")
        fresh = self.snapshot(_state=self._built(saved, tensors))
        if fresh.comparable() != saved["compared"]:
            raise ValueError("its parts do not match its description")
        fresh.check_scores()
        fresh.restore_fit()
        return fresh

    def _built(self, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Calibrated:
        """Return a saved state, if this predictor could have been calibrated to it."""
        users = list(own_objects([*self._given, *self.config().values()]))
        score, described = self._given[0], saved["compared"]["score"]
        if describe(score, self.model) != described:
            score = build(described, self.model, users)
        calibration = build(saved["calibration"], self.model, users)
        self._must_accept(saved["compared"], score)
        for name in (*score.requires().norms, *score.requires().values):
            resolve(self.model, name)
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        if not isinstance(score, Selection):
            score = score.with_state(with_prefix("score.", copies))
            _must_have_state(score, with_prefix("score.", copies))
        calibration = calibration.with_state(with_prefix("calibration.", copies))
        _must_have_state(calibration, with_prefix("calibration.", copies))
        weights = files.rebuilt(str | None, saved["fingerprint"])
        if bool(len(calibration)) != (weights is not None):
            raise ValueError("it has scores without a fingerprint of the weights, or the reverse")
        autocast = checked_autocast(files.rebuilt(str, saved["autocast"]))
        return Calibrated(
            score,
            calibration,
            None if weights is None else Identity(weights, autocast),
            files.checked_layout(saved["layout"]),
            {name: _restored_report(report) for name, report in saved["report"].items()},
            files.count(saved["set_aside"]),
            files.rebuilt(tuple[str, ...], saved["runs"]),
            files.rebuilt(Counts, saved["counts"]),
        )

    def _must_accept(self, saved: Mapping[str, Any], score: Any) -> None:
        """Raise ValueError for a saved calibration that this predictor cannot have had."""
        given, calibration = self._given
        is_mondrian = saved["calibration"].get("class") == "Mondrian"
        expected = self._comparable(given, by_groups(calibration) if is_mondrian else calibration)
        expected["learned"] = saved["learned"]
        if isinstance(given, Selection) and given.accepts(score):
            expected["score"] = None
        for name, value in expected.items():
            if name in ("score", "calibration"):
                is_same = _is_possible(value, saved[name])
            else:
                is_same = value == saved[name]
            if not is_same:
                listed = ", ".join(differences(expected, saved))
                raise ValueError(f"settings differ, so the scores are not comparable: {listed}")

    def check_scores(self) -> None:
        """Raise ValueError if loaded scores are impossible."""
        score, scores = self._state.score, self.calibration.scores
        if bool((scores < score.lowest).any() or (scores == -math.inf).any()):
            raise ValueError(f"expected scores of at least {score.lowest:g}, got smaller ones")
        if not score.takes_infinity and bool(scores.isinf().any()):
            raise ValueError("expected finite scores, got infinite ones")
        if bool(scores.isnan().any()) and not (self.takes_nan or is_summary(self.calibration)):
            raise ValueError("expected scores, got NaN")

    takes_nan = False  # whether NaN may stand for the score of a missing target

    def restore_fit(self) -> None:
        """Restore the learned state of training rows from a loaded state."""

    # -- files and state_dict ---------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the calibration, without the model's weights, to a safetensors file.

        The file appears complete or not at all. Read it with :func:`ffcp.load`.

        Parameters
        ----------
        path : str or Path
            The file to write.
        """
        snapshot = self.snapshot()
        weights = snapshot.fingerprint
        if weights is not None and weights != fingerprint(snapshot.model):
            raise RuntimeError(
                "the model's weights are no longer those of the calibration: calibrate again "
                "before saving"
            )
        files.write(path, snapshot.state())

    def load(self: Self, path: str | Path) -> Self:
        """Read a calibration written by :meth:`save`; nothing is unpickled.

        Nothing is changed where the file is damaged, or has other settings or weights than this
        predictor: that is a :class:`ffcp.CalibrationFileError`.

        Parameters
        ----------
        path : str or Path
            A file that :meth:`save` wrote.
        """
        tensors = files.read(path)
        with self._lock.turn:
            with files.refused(path):
                fresh = self.restored(tensors)
                fresh.check_model(self.model)
            self.take_over(fresh)
        return self

    def take_over(self, fresh: Persistent) -> None:
        """Replace this predictor's state by that of another one of the same model."""
        self.__dict__.update({**fresh.__dict__, "_modules": self._modules})

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return model and calibration, as they are at one moment; see torch's own."""
        self._detach_owner()
        return nn.Module.state_dict(self.snapshot(), *args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(prefixed(prefix, self.tensors()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *keys_and_errors: Any
    ) -> None:
        self._detach_owner()
        state = with_prefix(prefix, state_dict)
        state = {name: tensor for name, tensor in state.items() if not name.startswith("model.")}
        if state:  # otherwise it holds a model alone, and the calibration stays
            with self._lock.turn, files.refused("the calibration in this state_dict"):
                fresh = self.restored(state, strict)
                # Weights of an owner may be loaded after this; they are checked when predicting.
                if "model" in self._modules:
                    weights = with_prefix(f"{prefix}model.", state_dict)
                    assign = metadata.get("assign_to_params_buffers", False)
                    fresh.check_model(self.model, weights, assign)
                self.take_over(fresh)
        # What belongs to no module was loaded above.
        loaded = tuple(prefix + part for part in _PARTS)
        rest = {name: t for name, t in state_dict.items() if not name.startswith(loaded)}
        super()._load_from_state_dict(rest, prefix, metadata, strict, *keys_and_errors)

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_modules": dict(self._modules)}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = WriterLock()

    # -- as an attribute of the model -------------------------------------------------------

    def _detach_owner(self) -> None:
        """Remove the model from torch's tree of modules, if this predictor is a part of the model.

        A LightningModule may hold its predictor as an attribute: in a cycle, ``.to()`` and
        ``state_dict`` would never end.
        """
        model = self._modules.get("model")
        if model is not None and any(part is self for part in model.modules()):
            self.__dict__["model"] = model
            self._modules.pop("model", None)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model, unless this predictor is a part of it."""
        self._detach_owner()  # before .to(), train() and others go through them
        yield from super().named_children()

    def __repr__(self) -> str:
        """Describe the model, what scores depend on, and how many rows calibrate.

        >>> import ffcp, torch
        >>> ffcp.CP(nn.Linear(3, 1)).calibrate(torch.randn(99, 3), torch.randn(99))
        CP: calibrated on 99 rows
          model: Linear, 4 parameters
          score: ScaledScore(base=Point(), scale=Constant())
          calibration: Marginal()
        """
        rows, aside = len(self.calibration), self._state.set_aside
        head = f"calibrated on {rows:,} rows" if rows else "not calibrated yet"
        head += f", {aside:,} more selected and do not calibrate" if aside else ""
        parameters = sum(weight.numel() for weight in self.model.parameters())
        settings = self.comparable()
        del settings["learned"]  # a hash
        parts = {"model": f"{type(self.model).__name__}, {parameters:,} parameters"}
        for report in self._state.report.values():
            if isinstance(report, ShownAsTable):
                parts["method"] = report.ranking().above[0]
        if isinstance(self._state.score, Selection):
            parts["method"] = f"{self._state.score.what} is selected when rows calibrate"
        if "method" in parts:
            del settings["score"]
        parts |= {name: shown(value) for name, value in settings.items() if not is_default(value)}
        lines = [wrapped(f"  {name}: {text}") for name, text in parts.items()]
        return "\n".join([f"{type(self).__name__}: {head}", *lines])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {name: [str(t.dtype), *t.shape] for name, t in tensors.items()}


def learned_hash(described: Any, tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the learned tensors and of the score that they belong to."""
    digest = hashlib.sha256(json.dumps(described).encode())
    files.hash_tensors(digest, tensors)
    return digest.hexdigest()


def _must_have_state(loaded: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if an object would not save the tensors that it was loaded from."""

    def contents(state: Mapping[str, Tensor]) -> dict[str, Any]:
        return {n: (t.dtype, t.shape, t.contiguous().numpy().tobytes()) for n, t in state.items()}

    if contents(loaded.state()) != contents(tensors):
        raise ValueError(f"its tensors are not those of a {type(loaded).__name__}")


def _is_possible(given: Any, saved: Any) -> bool:
    """Whether a saved description is a selection from a given one."""
    if isinstance(given, Mapping) and "scales" in given:  # candidates, of which one was selected
        return saved == given or saved == {"class": "Constant"} or saved in given["scales"]
    if isinstance(given, Mapping) and isinstance(saved, Mapping):
        return all(_is_possible(given.get(name), value) for name, value in saved.items())
    if given == saved or given in _OPEN:
        return True
    # One layer of a list. True would equal a 1 in a list of numbers, but is no layer.
    is_layer = isinstance(saved, (str, Mapping))
    return isinstance(given, list) and is_layer and saved in [*given, "output"]


def _plain_report(report: Any) -> Any:
    if not is_dataclass(report):
        return report
    return {"class": type(report).__name__, **asdict(report)}  # type: ignore[arg-type]


def _restored_report(saved: Any) -> Any:
    if not isinstance(saved, dict) or "class" not in saved:
        return saved
    values = {name: value for name, value in saved.items() if name != "class"}
    return files.rebuilt(class_named(saved["class"]), values)
