"""The named methods for prediction sets, each a label score with a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch  # noqa: F401 - for the examples
from torch import nn

from ffcp.arguments import Running, known_only
from ffcp.classification.named_scores import APSScore, FFRAPSScore, LACScore, RAPSScore
from ffcp.classification.rules import SOFTMAX
from ffcp.classification.scores import FIT, RuleScore
from ffcp.classification.set_predictor import SetPredictor
from ffcp.conformal.by_label import ByLabel
from ffcp.conformal.calibration import Calibration
from ffcp.network.features import resolve
from ffcp.network.model_output import Output

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SetOptions(TypedDict, total=False):
    """The arguments that all named methods share; described in :class:`LAC`."""

    allow_zero_sets: bool
    class_conditional: bool
    calibration: Calibration | None
    tune_fraction: float
    tune_alpha: float
    seed: int | None
    batch_size: int | None
    output: Output
    names: Sequence[str] | None
    other_labels: bool


class Named(SetPredictor):
    """Base class of the named methods: shared arguments, and settings of the score."""

    def __init__(self, model: nn.Module, score: RuleScore, **common: Unpack[SetOptions]) -> None:
        known_only(type(self), common, SetOptions)
        class_conditional = common.pop("class_conditional", False)
        tune_fraction, tune_alpha = common.pop("tune_fraction", 0.2), common.pop("tune_alpha", 0.1)
        if not 0 < tune_fraction < 1:
            raise ValueError(f"'tune_fraction' must lie between 0 and 1, got {tune_fraction}")
        calibration = common.pop("calibration", None)
        if class_conditional and calibration is not None:
            raise ValueError(
                "class_conditional=True means calibration=ByLabel(), but 'calibration' is given "
                "too: leave out one of the two"
            )
        calibration = ByLabel() if class_conditional else calibration
        selection: Running = {"selection_fraction": tune_fraction, "selection_alpha": tune_alpha}
        super().__init__(model, score, calibration, **selection, **common)  # type: ignore[misc]
        self.randomized, self.class_conditional = score.randomized, class_conditional
        self.tune, self.tune_fraction, self.tune_alpha = score.tune, tune_fraction, tune_alpha
        self.feature = score.feature

    #: The constructor arguments that are settings of the score.
    _settings: tuple[str, ...] = ("temperature",)

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments, but for the model."""
        config = super().config()
        score, calibration = config.pop("score"), config.pop("calibration")
        del config["selection_fraction"], config["selection_alpha"]
        config |= {name: getattr(score, name) for name in self._settings}
        for name in ("tune_fraction", "tune_alpha", "class_conditional"):
            config[name] = getattr(self, name)
        config["calibration"] = None if self.class_conditional else calibration
        return config

    def setting(self, name: str) -> Any:
        """Return a setting of the score; ``None`` until it is selected."""
        value = getattr(self._state.score, name)
        return None if value == FIT else value

    @property
    def temperature(self) -> float | None:
        """The temperature that logits are divided by; ``None`` until it is fitted."""
        value: float | None = self.setting("temperature")
        return value


class LAC(Named):
    """Least ambiguous sets: all labels of at least a certain probability (Sadinle et al., 2019).

    Sets are the smallest on average, but difficult rows are covered too rarely. The score is
    1 - p; probabilities below 2^-20 (1e-6), which it hardly distinguishes, have the score
    1 + log(2^-20 / p).

    Parameters
    ----------
    model : nn.Module
        A trained network; forward returns logits of shape (n, K).
    temperature : float or str, default=1.0
        Logits are divided by it; ``"fit"`` fits it by likelihood on rows set aside, which are not
        used for calibration.
    allow_zero_sets : bool, default=False
        Whether sets may be empty; if not, an empty set gets the most probable label.
    class_conditional : bool, default=False
        Calibrate each class separately, so that each is covered with probability 1 - alpha.
        Classes with too few rows are in every set.
    calibration : Calibration, default=None
        How scores are kept and thresholds looked up, :class:`ffcp.calibrations.Marginal` by
        default; :class:`ffcp.calibrations.Weighted` or :class:`ffcp.calibrations.LabelShift` where
        the data has shifted.
    tune_fraction : float, default=0.2
        Share of the rows set aside for tuning.
    tune_alpha : float, default=0.1
        Level at which candidates are compared.
    seed : int, default=None
        Seed of the split.
    batch_size : int, default=None
        Rows per pass over arrays; by default about 16 MB of input (2 MB of images), at most
        8,192 rows.
    output : str, int or callable, default=None
        Which part of the model's return value is the prediction, if it is a tuple, a dict or
        similar: a key (``"logits"``), an index, or a function.
    names : sequence of str, default=None
        Class names, in the order of the model's outputs. Labels may then be names as well as
        integers, and the labels of a set are names.
    other_labels : bool, default=False
        Whether a row's label may be none of the model's classes: see
        :class:`ffcp.SetPredictor`.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> sets = LAC(model).calibrate(x[:100], y[:100]).predict_set(x[100:], alpha=0.1)
    >>> sets.mask.shape
    torch.Size([100, 3])
    """

    def __init__(
        self, model: nn.Module, *, temperature: float | str = 1.0, **common: Unpack[SetOptions]
    ) -> None:
        super().__init__(model, LACScore(temperature), **common)


class APS(Named):
    """Adaptive prediction sets: labels in order until their probabilities suffice (Romano, 2020).

    Parameters
    ----------
    model : nn.Module
        As in :class:`LAC`.
    temperature : float or str, default=1.0
        As in :class:`LAC`.
    **common : dict
        As in :class:`LAC`.
    randomized : bool, default=True
        Count only a random share of the last label's probability. Coverage is then 1 - alpha, up
        to 1 / (n + 1); empty sets are filled with a label, so it can be higher. With ``False``
        predictions are deterministic: the label that crosses the threshold is in the set. Sets
        are then a little larger and cover a little more; the calibration still draws shares, by
        ``seed``.
    seed : int, default=None
        Seed of the random shares, whose stream continues from call to call, and of the split.
        Without it the operating system seeds the shares.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x, y = nn.Linear(4, 3), torch.randn(200, 4), torch.randint(0, 3, (200,))
    >>> sets = APS(model, seed=0).calibrate(x[:100], y[:100]).predict_set(x[100:], alpha=0.1)
    >>> sets.coverage(y[100:]) > 0.8
    True
    """

    _settings = ("temperature", "randomized")

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float | str = 1.0,
        randomized: bool = True,
        **common: Unpack[SetOptions],
    ) -> None:
        super().__init__(model, APSScore(temperature, randomized=randomized), **common)


class Penalised(Named):
    """Base class of the methods with a penalty on ranks."""

    @property
    def lam(self) -> float | None:
        """Penalty of a rank; ``None`` until it is tuned."""
        value: float | None = self.setting("lam")
        return value

    @property
    def kreg(self) -> int | None:
        """How many ranks have no penalty; ``None`` until it is tuned."""
        value: int | None = self.setting("kreg")
        return value


class RAPS(Penalised):
    """Regularised adaptive prediction sets: APS with a penalty on ranks (Angelopoulos, 2021).

    The score of the label at rank r grows by ``lam * max(r - kreg, 0)``, which excludes the long
    tail of improbable labels.

    Parameters
    ----------
    model : nn.Module
        As in :class:`LAC`.
    temperature : float or str, default=1.0
        As in :class:`LAC`.
    **common : dict
        As in :class:`LAC`.
    randomized : bool, default=True
        As in :class:`APS`.
    seed : int, default=None
        As in :class:`APS`.
    lam : float, default=None
        Penalty of a rank; 0.01 if neither given nor tuned.
    kreg : int, default=None
        How many ranks have no penalty; 5 if neither given nor tuned.
    tune : str, default=None
        ``"size"`` tunes the arguments left out for small sets, ``"coverage"`` for the smallest
        size-stratified coverage violation, on rows that are not used for calibration: a fifth of
        them, at most 10,000. The logits of the other rows stay in memory until these are
        complete. Candidates are compared by a single threshold, also with ``class_conditional``.

    Attributes
    ----------
    choice : SetChoice or None
        The tuned settings and all candidates.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model, x = nn.Linear(4, 10), torch.randn(600, 4)
    >>> y = torch.distributions.Categorical(logits=model(x)).sample()
    >>> predictor = RAPS(model, tune="size").calibrate(x[:500], y[:500])
    >>> predictor.choice.rows
    100
    >>> sets = predictor.predict_set(x[500:], alpha=0.1)
    >>> len(sets.labels[0]) == sets.sizes[0]
    tensor(True)
    """

    _settings = ("lam", "kreg", "temperature", "tune", "randomized")

    def __init__(
        self,
        model: nn.Module,
        lam: float | None = None,
        kreg: int | None = None,
        *,
        temperature: float | str = 1.0,
        tune: str | None = None,
        randomized: bool = True,
        **common: Unpack[SetOptions],
    ) -> None:
        score = RAPSScore(
            lam,
            kreg,
            temperature=temperature,
            tune=tune,
            randomized=randomized,
            allow_empty=common.get("allow_zero_sets", False),
        )
        super().__init__(model, score, **common)


class FFRAPS(Penalised):
    """RAPS with the norm of the network's gradient in the score (the paper's FFRAPS).

    With ``delta=0`` it is RAPS, to the last bit.

    Parameters
    ----------
    model : nn.Module
        As in :class:`RAPS`.
    lam : float, default=None
        As in :class:`RAPS`.
    kreg : int, default=None
        As in :class:`RAPS`.
    temperature : float or str, default=1.0
        As in :class:`RAPS`.
    tune : str, default=None
        As in :class:`RAPS`.
    randomized : bool, default=True
        As in :class:`RAPS`.
    **common : dict
        As in :class:`RAPS`.
    delta : float, default=None
        Weight of the gradient norm; 0.01 if neither given nor tuned.
    gradient : str, default="softmax"
        ``"softmax"``, as in the published code: the probability of label j grows by delta times
        the norm of its gradient with respect to the logits,
        p_j sqrt(1 - 2 p_j + sum p^2) / temperature,
        before labels are sorted and summed. No backward pass.

        ``"feature"``, as in the paper's algorithm: the score of all labels of a row grows by
        delta times the norm of the gradient of the top label's probability at ``feature``. One
        backward pass through the layers behind it. The probability is that of the model
        itself, at temperature 1.
    feature : str or nn.Module, default=None
        For ``gradient="feature"``: a dotted module name, a module, or ``"input"``.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 10))  # yours is trained
    >>> x, y = torch.randn(200, 4), torch.randint(0, 10, (200,))
    >>> predictor = FFRAPS(model, gradient="feature", feature="0").calibrate(x[:100], y[:100])
    >>> predictor.predict_set(x[100:], alpha=0.1).sizes.shape
    torch.Size([100])
    """

    _settings = ("delta", "lam", "kreg", "gradient", "feature", "temperature", "tune", "randomized")

    def __init__(
        self,
        model: nn.Module,
        delta: float | None = None,
        lam: float | None = None,
        kreg: int | None = None,
        gradient: str = SOFTMAX,
        feature: str | nn.Module | None = None,
        *,
        temperature: float | str = 1.0,
        tune: str | None = None,
        randomized: bool = True,
        **common: Unpack[SetOptions],
    ) -> None:
        score = FFRAPSScore(
            delta,
            lam,
            kreg,
            gradient,
            None if feature is None else resolve(model, feature),
            temperature=temperature,
            tune=tune,
            randomized=randomized,
            allow_empty=common.get("allow_zero_sets", False),
        )
        super().__init__(model, score, **common)
        self.gradient = gradient

    @property
    def delta(self) -> float | None:
        """Weight of the gradient norm; ``None`` until it is tuned."""
        value: float | None = self.setting("delta")
        return value
