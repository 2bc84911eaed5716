"""What is done with a finished calibration: merge, compress, save and load it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ffcp import files
from ffcp.batch import Requires
from ffcp.calibrated import Calibrated
from ffcp.conformal.calibration import Calibration
from ffcp.conformal.columns import prefixed, with_prefix
from ffcp.conformal.compressed import ERROR
from ffcp.conformal.compression import compressed, joined, recalled
from ffcp.conformal.mondrian import by_groups
from ffcp.conformal.random_numbers import Stream
from ffcp.conformal.selection import Score
from ffcp.locks import WriterLock
from ffcp.network.features import resolve
from ffcp.network.model import Identity, Stamp, checked_autocast, fingerprint
from ffcp.network.model_output import Output, output_name
from ffcp.recipes import recipe_of

Self = TypeVar("Self", bound="Persistent")


class Persistent(nn.Module):
    """A model, a scorer and a calibration that can be merged, saved, loaded and copied."""

    model: nn.Module
    output: Output
    is_predictor = True  # see ffcp.network.hidden_weights.function_of
    #: What is predicted; only predictors of the same kind can be merged.
    task = ""
    _given: tuple[Score, Calibration]  # as given, with whatever they leave open
    _fitted: Mapping[str, Any]  # choices made before calibrating, on other points
    _state: Calibrated  # replaced by one assignment
    seed: int | None
    _stream: Stream
    _lock: WriterLock  # held by whoever makes the next state from the one there is
    _stamp: Stamp | None = None  # of the model when a call began, see steady

    @property
    def calibration(self) -> Calibration:
        """The calibration in use, with its scores."""
        return self._state.calibration

    @property
    def _scorer(self) -> Any:
        return self._state.scorer

    @property
    def layout(self) -> Mapping[str, Any]:
        """What inputs and targets were like, see :class:`ffcp.network.inputs.Reader`."""
        return self._state.layout

    @property
    def identity(self) -> Identity | None:
        """Of the model that was calibrated; ``None`` where there are no scores."""
        return self._state.identity

    # -- what a task defines ----------------------------------------------------------------

    def _own_settings(self) -> dict[str, Any]:
        """Say what scores depend on besides model, scorer and calibration."""
        return {}

    def _remembered(self) -> dict[str, Any]:
        """Give what is saved with the settings though no score depends on it."""
        return {"layout": self.layout}

    def _recalled_counts(self, saved: Mapping[str, Any], scores: int) -> dict[str, Any]:
        """Return the counts of a saved calibration with so many scores; refuse what cannot be."""
        return {}

    def check_scores(self) -> None:
        """Refuse, by ValueError, a loaded calibration with scores that cannot be."""
        scores = self.calibration.scores
        if bool((scores < self._scorer.lowest).any() or (scores == -math.inf).any()):
            raise ValueError(f"it has scores below {self._scorer.lowest:g}, where none can be")
        if not self._scorer.takes_infinity and bool(scores.isinf().any()):
            raise ValueError("it has infinite scores, where none can be")
        if not self._takes_nan and bool(scores.isnan().any()):
            raise ValueError("it has scores that are not numbers")

    @property
    def _takes_nan(self) -> bool:
        """Whether NaN may stand for a score that is not known."""
        return False

    # -- settings ---------------------------------------------------------------------------

    def _check_features(self, requires: Requires) -> None:
        for name in (*requires.norms, *requires.values):
            resolve(self.model, name)

    def settings(self) -> dict[str, Any]:
        """Everything, the model apart, that a threshold depends on."""
        return self._settings_of(self._scorer, self.calibration)

    def _settings_of(self, scorer: Score, calibration: Calibration) -> dict[str, Any]:
        return {
            "task": self.task,
            **scorer.settings(),
            **calibration.settings(),
            **self._own_settings(),
            **({} if self.output is None else {"output": output_name(self.output)}),
        }

    def _must_match(self, mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str) -> None:
        keys = dict.fromkeys([*mine, *theirs])
        keys.pop(ERROR, None)  # summaries and whole calibrations can stand beside each other
        differing = [key for key in keys if mine.get(key) != theirs.get(key)]
        if differing:
            listed = ", ".join(f"{k}={theirs.get(k)!r} (here {mine.get(k)!r})" for k in differing)
            raise ValueError(
                f"{whose} has other settings, so its scores mean another thing: {listed}"
            )

    def check_weights(self, now: Stamp | None = None) -> None:
        """Refuse a model that is not run as it was when it was calibrated, or has other weights."""
        if self._state.identity is not None:
            self._state.identity.check(self.model, now)

    def snapshot(self: Self, **changes: Any) -> Self:
        """Return a predictor with the state of now, or changed so, which nothing else changes."""
        snapshot = object.__new__(type(self))
        snapshot.__dict__.update(self.__dict__)
        snapshot.__dict__["_modules"] = modules = dict(self._modules)
        snapshot.__dict__.update(modules)  # found at once there, not in torch's second look
        snapshot.__dict__.update(changes)
        return snapshot

    def _must_be_calibrated(self) -> None:
        if not len(self.calibration):
            raise RuntimeError(
                f"this {type(self).__name__} has no calibration: call calibrate(x, y) first, with "
                "points that did not train the model"
            )

    def calibrated(self) -> Calibrated:
        """Return what is calibrated, or refuse."""
        self._must_be_calibrated()
        return self._state

    def _must_have(self, theirs: str, whose: str) -> None:
        """Refuse scores of a network with another fingerprint."""
        if theirs != (self._state.fingerprint or fingerprint(self.model)):
            raise ValueError(
                f"{whose} are those of other weights, and would not cover here: calibrate the "
                "same model"
            )

    # -- sharing the calibration ------------------------------------------------------------

    def merge(self: Self, other: Persistent) -> Self:
        """Add the scores of another predictor of the same model, calibrated on other points.

        So calibration can be divided over workers and put together here. What is known to be
        here already is refused: the same predictor, a copy of it, or one loaded from its file.
        Where something is chosen automatically, let one worker choose, and give what it found
        to the others.
        """
        if not isinstance(other, Persistent) or other.task != self.task:
            raise TypeError(f"cannot merge a {type(other).__name__}")
        if other is self:
            raise ValueError("a predictor cannot be merged with itself: points would count twice")
        with self._lock.turn:
            self._state = self._merged(other.snapshot())
        return self

    def _merged(self, other: Persistent) -> Calibrated:
        """Return the state with the scores of a predictor that nothing changes meanwhile."""
        if not len(other.calibration):
            raise ValueError(
                "the predictor to merge has no calibration: call calibrate(x, y) on it first"
            )
        if not len(self.calibration) and other.calibration.takes_groups:
            settings = self._settings_of(self._scorer, by_groups(self.calibration))
        else:
            settings = self.settings()
        self._must_have_chosen(settings, other.settings())
        self._must_match(settings, other.settings(), "the predictor to merge")
        self._check_merge(other)
        mine, theirs = self._state, other.calibrated()
        assert theirs.identity is not None
        self._must_have(theirs.identity.fingerprint, "the scores to merge")
        if mine.identity is not None:
            mine.identity.must_be_run_alike(theirs.identity.autocast)
        mine.check_merge(theirs)
        return replace(
            mine,
            calibration=joined(mine.calibration, theirs.calibration),
            identity=mine.identity or copy.copy(theirs.identity),  # with no stamp
            layout={**theirs.layout, **mine.layout},
            runs=mine.runs + theirs.runs,
            counts=self._merged_counts(mine.counts, theirs.counts),
        )

    def compress(self: Self, rank_error: Any = 1e-4) -> Self:
        """Keep a summary of the scores in place of all of them.

        Of every group and output at most 1 / rank_error are kept, 80 kB at 1e-4. Thresholds are
        rounded up, so what is promised holds; ``calibration.rank_error`` says by how much at most.
        Summaries merge with each other and with whole calibrations: errors, in ranks, add up.

        Parameters
        ----------
        rank_error
            By how many ranks a threshold may become larger, as a share of the calibration points
            of its group.

        Examples
        --------
        >>> import ffcp, torch
        >>> model, x, y = nn.Linear(3, 1), torch.randn(5000, 3), torch.randn(5000)
        >>> predictor = ffcp.CP(model).calibrate(x, y).compress(rank_error=0.01)
        >>> len(predictor.calibration), len(predictor.calibration.scores)
        (5000, 99)
        """
        with self._lock.turn:
            state = self.calibrated()
            smaller = compressed(state.calibration, rank_error)
            self._state = replace(state, calibration=smaller)
        return self

    def _must_have_chosen(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        """Refuse scores of a worker that chose otherwise, and say what to do."""
        given = self._settings_of(*self._given)
        chosen = {key: mine.get(key) for key, value in given.items() if value is None}
        differing = {k: v for k, v in chosen.items() if v is not None and v != theirs.get(k)}
        if differing:
            listed = ", ".join(f"{k}={theirs.get(k)!r} (here {v!r})" for k, v in differing.items())
            chosen_here = ", ".join(f"{key}={value!r}" for key, value in differing.items())
            raise ValueError(
                f"each worker chose for itself, and the predictor to merge has other settings: "
                f"{listed}. Let one worker choose, and hand its predictor.settled() to all others; "
                f"or make them with what it chose: {chosen_here}"
            )

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be selected when this predictor is calibrated."""
        return not any(piece.is_open for piece in self._given)

    def settled(self: Self, seed: int | None = None) -> Self:
        """Return a predictor of the same model without scores, for which nothing is open any more.

        What was selected or learned here stays: workers that calibrate such predictors, or copies
        of them, on rows of their own can be merged. ``seed`` is that of its random numbers, of
        which each worker needs others; by default the operating system seeds them.
        """
        state = self._state
        return self._without_scores(state.scorer, state.calibration, state.choices, seed)

    def uncalibrated(self: Self, seed: int | None = None) -> Self:
        """Return a predictor of the same model as this one was before it was calibrated."""
        return self._without_scores(*self._given, self._fitted, seed)

    def _without_scores(
        self: Self,
        scorer: Score,
        calibration: Calibration,
        choices: Mapping[str, Any],
        seed: int | None,
    ) -> Self:
        empty, counts = calibration.empty(), self._state.counts
        recipe = recipe_of(self)
        if recipe is not None and "seed" in recipe["with"]:
            recipe = {**recipe, "with": {**recipe["with"], "seed": seed}}
        return self.snapshot(
            seed=seed,
            _given=(scorer, empty),
            _fitted=choices,
            _state=Calibrated(scorer, empty, None, self.layout, choices, counts=counts),
            _lock=WriterLock(),
            _stream=Stream(seed),
            **({} if recipe is None else {"_recipe": recipe}),
        )

    def _check_merge(self, other: Any) -> None:
        """Refuse another predictor whose scores cannot stand beside these."""

    def _merged_counts(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what two calibrations counted together."""
        return {}

    def get_extra_state(self) -> Tensor:
        """Pack the settings for ``state_dict``, as a tensor so that any format can hold it.

        They come with a checksum over them and over the points.
        """
        state = self._state
        choices = {n: asdict(c) if is_dataclass(c) else c for n, c in state.choices.items()}  # type: ignore[arg-type]
        points = state.calibration.points()
        learned = state.scorer.state()
        kept = {
            "choices": choices,
            "set_aside": state.set_aside,
            "fingerprint": state.fingerprint,
            "autocast": "" if state.identity is None else state.identity.autocast,
            "shapes": {name: list(tensor.shape) for name, tensor in points.items()},
            "runs": list(state.runs),
            **self._remembered(),
        }
        saved = {
            "format": files.FORMAT,
            "settings": self.settings(),
            "kept": kept,
            "recipe": recipe_of(self),
        }
        return files.seal(saved, {**points, **prefixed("scorer.", learned)})

    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: loading has taken over all of it at once, points and settings together."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return model and calibration, as they are at one moment; see torch's own."""
        self._hold_owner_apart()
        return nn.Module.state_dict(self.snapshot(), *args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update(prefixed(f"{prefix}calibration.", self.calibration.points()))
        destination.update(prefixed(f"{prefix}scorer.", self._scorer.state()))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any
    ) -> None:
        self._hold_owner_apart()
        own = _own(with_prefix(prefix, state_dict))
        if own:  # otherwise it holds a model alone, and the calibration stays
            with files.refused("the calibration in this state_dict"):
                fresh = self.restored(own, strict)
                # Weights of an owner may be loaded after this; they are looked at when predicting.
                if fresh.identity is not None and "model" in self._modules:
                    weights = with_prefix(f"{prefix}model.", state_dict)
                    assign = metadata.get("assign_to_params_buffers", False)
                    fresh.identity.must_be_that_of(self.model, weights, assign)
            self.take_over(fresh)
        # What is no part of any module was taken over above.
        ours = (f"{prefix}scorer.", f"{prefix}calibration.")
        rest = {name: t for name, t in state_dict.items() if not name.startswith(ours)}
        super()._load_from_state_dict(rest, prefix, metadata, strict, *others)

    def state(self) -> dict[str, Tensor]:
        """Return the calibration as tensors, without the model's weights: what a file holds."""
        now = self.snapshot()
        now._modules.pop("model", None)
        return dict(nn.Module.state_dict(now))

    def restored(self: Self, own: Mapping[str, Tensor], strict: bool = True) -> Self:
        """Return this predictor with the calibration of a :meth:`state`, once all is checked.

        Nothing here is changed. What was left open here comes from there. Whether the model has the
        weights it belongs to is for the caller to look at.
        """
        points = with_prefix("calibration.", own)
        learned = prefixed("scorer.", with_prefix("scorer.", own))
        known = ["_extra_state", *prefixed("calibration.", points), *learned]
        strange = [name for name in own if name not in known]
        if strict and strange:
            raise ValueError(f"it does not fit a {type(self).__name__}: {', '.join(strange)}")
        if "_extra_state" not in own:
            raise ValueError("its settings are missing")
        saved = files.unseal(own["_extra_state"], {**points, **learned})
        if saved.get("format") != files.FORMAT:
            raise ValueError("it was saved by another version of ffcp: calibrate again")
        if saved["kept"]["shapes"] != {name: list(t.shape) for name, t in points.items()}:
            raise ValueError("its points have other shapes than were saved")
        tensors = points, with_prefix("scorer.", learned)
        fresh = self.snapshot(_state=self._recalled(saved["settings"], saved["kept"], *tensors))
        fresh.check_scores()
        fresh.restore_fit()
        return fresh

    def restore_fit(self) -> None:
        """Take what training rows taught out of a state that was loaded."""

    def _recalled(
        self,
        settings: Mapping[str, Any],
        kept: Mapping[str, Any],
        points: Mapping[str, Tensor],
        learned: Mapping[str, Tensor],
    ) -> Calibrated:
        """Return a saved state, if it was made with this predictor's settings."""
        given, calibration = self._given
        scorer = given.recalled(settings, learned)
        calibration = self._kept_by(calibration, settings).restored(settings)
        if settings.get("groups"):
            calibration = by_groups(calibration)
        calibration = recalled(calibration, settings)
        mine = self._settings_of(scorer, calibration)
        self._must_match(mine, settings, "the loaded calibration")
        self._check_features(scorer.requires().joined(calibration.requires()))
        scores = calibration.empty()
        scores.check(points)
        scores.keep({n: t.detach().to("cpu", copy=True) for n, t in points.items()})
        saved = files.rebuilt(str | None, kept["fingerprint"])
        if bool(len(scores)) != (saved is not None):
            raise ValueError("it has points without the weights they belong to, or the reverse")
        autocast = checked_autocast(files.rebuilt(str, kept.get("autocast", "")))
        choices = kept["choices"]
        return Calibrated(
            scorer,
            scores,
            None if saved is None else Identity(saved, autocast),
            files.checked_layout(kept.get("layout", {})),
            {
                **given.choices_from(choices),
                **scorer.choices_from(choices),
                **calibration.choices_from(choices),
            },
            files.count(kept["set_aside"]),
            files.rebuilt(tuple[str, ...], kept["runs"]),
            self._recalled_counts(kept, len(scores)),
        )

    def _kept_by(self, calibration: Calibration, settings: Mapping[str, Any]) -> Calibration:
        """Give the calibration that kept what was saved, where it may be another than was given."""
        return calibration

    def take_over(self, fresh: Persistent) -> None:
        """Take over all that another predictor of this model has, at once."""
        self.__dict__.update({**fresh.__dict__, "_modules": self._modules})

    def save(self, path: str | Path) -> None:
        """Write the calibration, without the model's weights, to a safetensors file.

        The file is written whole or not at all.
        """
        now = self.snapshot()
        if now.identity is not None and now.identity.fingerprint != fingerprint(now.model):
            raise RuntimeError(
                "the model's weights are no longer those of the calibration: calibrate again "
                "before saving"
            )
        files.write(path, now.state())

    def load(self: Self, path: str | Path) -> Self:
        """Read a calibration written by :meth:`save`; nothing is unpickled.

        The model must have the very weights it was calibrated with. Every part of the file is
        checked before any of it is used: where something is wrong,
        :class:`ffcp.CalibrationFileError` says what, and this predictor stays as it is.
        :func:`ffcp.load` makes the predictor, too.
        """
        tensors = files.read(path)
        with files.refused(path):
            fresh = self.restored(tensors)
            if fresh.identity is not None:
                fresh.identity.must_be_that_of(self.model)
        self.take_over(fresh)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_modules": dict(self._modules)}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._lock = WriterLock()

    # -- as an attribute of the model --------------------------------------------------------

    def _hold_owner_apart(self) -> None:
        """Take the model out of torch's tree of modules, if this predictor is a part of the model.

        ``self.predictor = ffcp.CP(self)`` makes that tree a circle, which torch goes round until
        Python stops it. The model then moves, saves and loads what the predictor holds.
        """
        model = self._modules.get("model")
        if model is not None and any(part is self for part in model.modules()):
            self.__dict__["model"] = model
            self._modules.pop("model", None)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model, unless this predictor is a part of it."""
        self._hold_owner_apart()  # before .to(), train() and others go through them
        yield from super().named_children()

    def extra_repr(self) -> str:
        """Show the settings, and how many points calibrate."""
        self._hold_owner_apart()
        listed = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return f"{listed}, calibrated on {len(self.calibration)} points"


def _own(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give what of a state is not the model's."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("model.")}
