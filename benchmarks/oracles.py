"""Agreement with other libraries on the same predictions: ``python -m benchmarks.oracles``.

Intervals, sets, metrics and probabilities of crepes, MAPIE, puncc, TorchCP and venn-abers are
compared with ours. Libraries that are not installed are listed and skipped. They need many
packages, so install them into a separate virtual environment:

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install -c constraints.txt torch safetensors rich crepes mapie venn-abers
    /tmp/peers/bin/pip install -c constraints.txt torch_geometric transformers matplotlib
    /tmp/peers/bin/pip install --no-deps torchcp puncc  # which asks for numpy below 2
    PYTHONPATH=src /tmp/peers/bin/python -m benchmarks.oracles
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import ffcp
from benchmarks.timing import show, table
from ffcp.classification import rules
from ffcp.online.martingales import OnlineRanks, PowerMixture

N, NEW, K, ALPHA = 1000, 500, 20, 0.1
DRIFT = np.arange(1000) >= 500
Array = np.ndarray
Peer = Callable[[], Array]


class Columns(nn.Module):
    """A network whose outputs are columns of the input, so that all libraries share predictions."""

    def __init__(self, *columns: int) -> None:
        super().__init__()
        self.columns = list(columns)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.columns] if len(self.columns) > 1 else x[:, self.columns[0]]


class Fitted:
    """A stand-in for a fitted scikit-learn estimator."""

    def __init__(self, function: Callable[[Array], Array], kind: str = "regressor") -> None:
        self._function, self._estimator_type, self._kind = function, kind, kind
        self.classes_, self.n_features_in_ = np.arange(K), K

    def fit(self, x: Any, y: Any) -> Fitted:
        return self

    def predict(self, x: Array) -> Array:
        values = self._function(np.asarray(x))
        return values.argmax(axis=1) if self._kind == "classifier" else values

    def predict_proba(self, x: Array) -> Array:
        return self._function(np.asarray(x))

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = importlib.import_module("sklearn.utils")
        kinds = {"classifier_tags": tags.ClassifierTags(), "regressor_tags": tags.RegressorTags()}
        own = {f"{self._kind}_tags": kinds[f"{self._kind}_tags"]}
        return tags.Tags(
            estimator_type=self._kind, target_tags=tags.TargetTags(required=True), **own
        )


class Whole(Fitted):
    """The same for puncc, which calls ``predict`` to get probabilities."""

    def predict(self, x: Array) -> Array:
        return self._function(np.asarray(x))


class Data(NamedTuple):
    """Columns: a prediction, two quantiles, a difficulty, a group; and the target."""

    x: Array
    y: Array

    def part(self, rows: slice) -> Data:
        return Data(self.x[rows], self.y[rows])


def column(number: int) -> Callable[[Array], Array]:
    return lambda x: x[:, number]


def regression(seed: int = 0) -> tuple[Data, Data]:
    random = np.random.default_rng(seed)
    size = N + NEW
    mean, hard = random.normal(size=size), np.exp(random.normal(size=size) / 2)
    y = mean + hard * random.normal(size=size)
    ends = mean[:, None] + np.array([-1.2, 1.0]) * hard[:, None] ** 0.5
    x = np.column_stack([mean, ends, hard, random.integers(0, 3, size)])
    data = Data(x, y)
    return data.part(slice(0, N)), data.part(slice(N, None))


def classification(spread: float, hotter: float, seed: int = 0) -> tuple[Data, Data]:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(N + NEW, K, generator=generator, dtype=torch.float64)
    y = torch.multinomial((logits / hotter).softmax(dim=1), 1, generator=generator)[:, 0]
    data = Data(logits.numpy(), y.numpy())
    return data.part(slice(0, N)), data.part(slice(N, None))


def softmax(x: Array) -> Array:
    return np.asarray(torch.from_numpy(x).double().softmax(dim=1))


# -- intervals ----------------------------------------------------------------------------------


def ends(interval: Any) -> Array:
    return np.stack([np.asarray(interval[0]), np.asarray(interval[1])], axis=1)


def module(name: str) -> Any:
    if name.startswith("torchcp") and "torchsort" not in sys.modules:
        # TorchCP imports it for a training loss; it has to be compiled, and nothing here uses it.
        stub = types.ModuleType("torchsort")
        stub.__dict__.update(soft_rank=None, soft_sort=None)
        sys.modules["torchsort"] = stub
    return importlib.import_module(name)


def crepes(cal: Data, new: Data, **options: int) -> Array:
    """Return intervals of crepes; options name the columns of its ``sigmas`` and ``bins``."""
    peer = module("crepes").ConformalRegressor()
    peer.fit(cal.y - cal.x[:, 0], **{key: cal.x[:, c] for key, c in options.items()})
    asked = {key: new.x[:, c] for key, c in options.items()}
    return np.asarray(peer.predict_int(new.x[:, 0], confidence=1 - ALPHA, **asked))


def mapie_cp(cal: Data, new: Data) -> Array:
    peer = module("mapie.regression").SplitConformalRegressor(
        Fitted(column(0)), confidence_level=1 - ALPHA
    )
    return np.asarray(peer.conformalize(cal.x, cal.y).predict_interval(new.x)[1][:, :, 0])


def mapie_cqr(cal: Data, new: Data) -> Array:
    models = [Fitted(column(c)) for c in (1, 2, 0)]
    peer = module("mapie.regression").ConformalizedQuantileRegressor(
        models, confidence_level=1 - ALPHA, prefit=True
    )
    _, ends = peer.conformalize(cal.x, cal.y).predict_interval(new.x, symmetric_correction=True)
    return np.asarray(ends[:, :, 0])


def puncc(kind: str, cal: Data, new: Data) -> Array:
    api, methods = module("deel.puncc.api.prediction"), module("deel.puncc.regression")
    model = [Fitted(column(c)) for c in range(5)]
    method = {
        "CP": lambda: methods.SplitCP(api.BasePredictor(model[0], is_trained=True), train=False),
        "CQR": lambda: methods.CQR(
            api.DualPredictor([model[1], model[2]], is_trained=[True, True]), train=False
        ),
        "normalised": lambda: methods.LocallyAdaptiveCP(
            api.MeanVarPredictor([model[0], model[3]], is_trained=[True, True]), train=False
        ),
    }[kind]()
    method.fit(X_fit=cal.x, y_fit=cal.y, X_calib=cal.x, y_calib=cal.y)
    return np.stack(method.predict(new.x, alpha=ALPHA)[1:3], axis=1)


def torchcp(kind: str, cal: Data, new: Data) -> Array:
    scores, peers = module("torchcp.regression.score"), module("torchcp.regression.predictor")
    score, columns = (scores.ABS(), (0,)) if kind == "CP" else (scores.CQR(), (1, 2))

    class Model(Columns):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(len(x), -1)

    rows = torch.utils.data.TensorDataset(torch.tensor(cal.x), torch.tensor(cal.y)[:, None])
    if kind == "CQR":
        rows = torch.utils.data.TensorDataset(torch.tensor(cal.x), torch.tensor(cal.y))
    peer = peers.SplitPredictor(score, Model(*columns), alpha=ALPHA, device=torch.device("cpu"))
    peer.calibrate(torch.utils.data.DataLoader(rows, batch_size=len(rows)))
    return np.asarray(peer.predict(torch.tensor(new.x)).reshape(len(new.x), 2))


def intervals() -> None:
    cal, new = regression()

    def ours(predictor: ffcp.IntervalPredictor, groups: int | None = None) -> Array:
        given, asked = (None if groups is None else part.x[:, groups] for part in (cal, new))
        predictor.calibrate(cal.x, cal.y, groups=given)
        return ends(predictor.predict_interval(new.x, ALPHA, groups=asked))

    hard = ffcp.IntervalPredictor(Columns(0), scale=lambda out: out.x[:, 3])
    rows: list[tuple[str, Array, Mapping[str, Peer]]] = [
        ("CP", ours(ffcp.CP(Columns(0))), {
            "crepes": lambda: crepes(cal, new),
            "MAPIE": lambda: mapie_cp(cal, new),
            "puncc": lambda: puncc("CP", cal, new),
            "TorchCP": lambda: torchcp("CP", cal, new),
        }),
        ("CQR", ours(ffcp.CQR(Columns(1, 2))), {
            "MAPIE": lambda: mapie_cqr(cal, new),
            "puncc": lambda: puncc("CQR", cal, new),
            "TorchCP": lambda: torchcp("CQR", cal, new),
        }),
        ("normalised", ours(hard), {
            "crepes": lambda: crepes(cal, new, sigmas=3),
            "puncc": lambda: puncc("normalised", cal, new),
        }),
        ("Mondrian", ours(ffcp.CP(Columns(0)), groups=4), {
            "crepes": lambda: crepes(cal, new, bins=4),
        }),
    ]  # fmt: skip
    report = table(
        f"Ends of {NEW} intervals, {N} rows", "method", "library", "largest difference", "why"
    )
    for name, interval, peers in rows:
        for library, ask in peers.items():
            other = asked(report, name, library, ask)
            if other is not None:
                largest = float(np.abs(other - interval).max())
                report.add_row(
                    name, library, f"{largest:.1g}", "" if largest < 1e-9 else WHY[name, library]
                )
    show(report)


WHY = {
    ("CP", "TorchCP"): "works in float32",
    ("CQR", "TorchCP"): "works in float32",
    ("CQR", "MAPIE"): "other corrections of the level",
    ("normalised", "puncc"): "adds 1e-12 to the difficulty",
    ("Mondrian", "crepes"): "another rank in a bin",
    ("CP", "crepes"): "another rank",
    ("CP", "MAPIE"): "another rank",
    ("CP", "puncc"): "another rank",
    ("CQR", "puncc"): "another rank",
    ("normalised", "crepes"): "another rank",
}  # shown only if there is a difference


def asked(report: Any, name: str, library: str, ask: Peer) -> Array | None:
    """Return the result of a library; report in the table if it is missing or fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ask()
    except ImportError as error:
        report.add_row(
            name,
            library,
            "",
            f"not installed ({error}): see the docstring of benchmarks/oracles.py",
        )
    except Exception as error:  # any error of another library is reported
        report.add_row(name, library, "", f"fails: {type(error).__name__}: {error}"[:90])
    return None


OTHERWISE = {
    ("lac", "MAPIE"): "1 - p is 1 for many labels",
    ("lac", "TorchCP"): "float32",
    ("aps", "MAPIE"): "as ours not randomised; where sums end at 1, labels are lost",
    ("aps", "puncc"): "one label more in every set",
    ("raps", "puncc"): "one label more in every set",
    ("aps", "TorchCP"): "sums end at 1: labels behind are told apart by rounding",
    ("raps", "TorchCP"): "sums end at 1, in float32",
}


# -- sets ----------------------------------------------------------------------------------------


def mapie_sets(kind: str, cal: Data, new: Data) -> Array:
    peer = module("mapie.classification").SplitConformalClassifier(
        Fitted(softmax, "classifier"),
        confidence_level=1 - ALPHA,
        conformity_score=kind,
        random_state=0,
    )
    options = {} if kind == "lac" else {"include_last_label": True}
    peer.conformalize(cal.x, cal.y)
    return np.asarray(peer.predict_set(new.x, conformity_score_params=options)[1][:, :, 0])


def puncc_sets(kind: str, cal: Data, new: Data) -> Array:
    api, methods = module("deel.puncc.api.prediction"), module("deel.puncc.classification")
    model = api.BasePredictor(Whole(softmax), is_trained=True)
    peer = {
        "lac": lambda: methods.LAC(model, train=False),
        "aps": lambda: methods.APS(model, train=False, rand=False),
        "raps": lambda: methods.RAPS(model, train=False, lambd=0.01, k_reg=5, rand=False),
    }[kind]()
    peer.fit(X_fit=cal.x, y_fit=cal.y, X_calib=cal.x, y_calib=cal.y)
    mask = np.zeros(new.x.shape, dtype=bool)
    for row, labels in zip(mask, peer.predict(new.x, alpha=ALPHA)[1], strict=True):
        row[list(labels)] = True
    return mask


def torchcp_sets(kind: str, cal: Data, new: Data) -> Array:
    scores = module("torchcp.classification.score")
    score = {
        "lac": lambda: scores.LAC(),
        "aps": lambda: scores.APS(randomized=False),
        "raps": lambda: scores.RAPS(randomized=False, penalty=0.01, kreg=5),
    }[kind]()
    peer = module("torchcp.classification.predictor").SplitPredictor(
        score, nn.Identity(), alpha=ALPHA, device=torch.device("cpu")
    )
    peer.calculate_threshold(torch.tensor(cal.x), torch.tensor(cal.y), ALPHA)
    return np.asarray(peer.predict_with_logits(torch.tensor(new.x)).bool())


def by_whole_weights(rule: rules.Rule, cal: Data, new: Data) -> Array:
    """Return our scores without randomness, as the other libraries compute them."""
    logits = torch.tensor(cal.x)
    rows = rules.LabelRows(logits, torch.ones(len(logits), dtype=torch.float64))
    scores = rules.label_scores(rule, rows, torch.tensor(cal.y))
    level = scores.sort().values[int(np.ceil((len(scores) + 1) * (1 - ALPHA) - 1e-9)) - 1]
    logits = torch.tensor(new.x)
    rows = rules.LabelRows(logits, torch.ones(len(logits), dtype=torch.float64))
    return rules.label_mask(rule, rows, level, allow_empty=True).numpy()


def covered(mask: Array, new: Data) -> float:
    return float(mask[np.arange(len(mask)), new.y].mean())


def sets(title: str, spread: float, hotter: float) -> None:
    cal, new = classification(spread, hotter)
    report = table(
        title, "method", "library", "mean size", "coverage", "labels that differ", "why, if they do"
    )
    all_rules: dict[str, rules.Rule] = {
        "lac": rules.Threshold(),
        "aps": rules.Cumulative(),
        "raps": rules.Cumulative(lam=0.01, kreg=5),
    }
    named: dict[str, dict[str, ffcp.SetPredictor]] = {
        "lac": {"LAC": ffcp.LAC(nn.Identity())},
        "aps": {
            "APS": ffcp.APS(nn.Identity(), seed=0),
            "APS, not randomised": ffcp.APS(nn.Identity(), seed=0, randomized=False),
        },
        "raps": {
            "RAPS": ffcp.RAPS(nn.Identity(), lam=0.01, kreg=5, seed=0),
            "RAPS, not randomised": ffcp.RAPS(
                nn.Identity(), lam=0.01, kreg=5, seed=0, randomized=False
            ),
        },
    }
    for kind, rule in all_rules.items():
        for name, predictor in named[kind].items():
            mask = predictor.calibrate(cal.x, cal.y).predict_set(new.x, ALPHA).mask.numpy()
            report.add_row(name, "ffcp", f"{mask.sum(1).mean():.2f}", f"{covered(mask, new):.3f}")
        ours = by_whole_weights(rule, cal, new)
        what = f"{kind.upper()}, whole weights" if kind != "lac" else "LAC"
        if kind != "lac":
            report.add_row(what, "ffcp", f"{ours.sum(1).mean():.2f}", f"{covered(ours, new):.3f}")
        for library, ask in (
            ("MAPIE", mapie_sets),
            ("puncc", puncc_sets),
            ("TorchCP", torchcp_sets),
        ):
            if (kind, library) == ("raps", "MAPIE"):
                continue  # it always tunes settings of its own
            other = asked(report, what, library, lambda a=ask, k=kind: a(k, cal, new))  # type: ignore[misc]
            if other is not None:
                report.add_row(
                    what, library, f"{other.sum(1).mean():.2f}", f"{covered(other, new):.3f}",
                    f"{int((other != ours).sum())} of {ours.size}",
                    OTHERWISE.get((kind, library), "") if (other != ours).any() else "",
                )  # fmt: skip
    show(report)


# -- too few points, and metrics -----------------------------------------------------------------


def few() -> None:
    cal, new = regression()
    cal = cal.part(slice(0, 5))  # alpha = 0.1 needs 9
    report = table("5 rows at alpha = 0.1: no finite interval is valid", "library", "mean length")
    ours = ends(ffcp.CP(Columns(0)).calibrate(cal.x, cal.y).predict_interval(new.x, ALPHA))
    report.add_row("ffcp", f"{(ours[:, 1] - ours[:, 0]).mean():.3g}")
    peers: dict[str, Peer] = {
        "crepes": lambda: crepes(cal, new),
        "MAPIE": lambda: mapie_cp(cal, new),
        "puncc": lambda: puncc("CP", cal, new),
        "TorchCP": lambda: torchcp("CP", cal, new),
    }
    for library, ask in peers.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = ask()
            report.add_row(library, f"{(other[:, 1] - other[:, 0]).mean():.3g}")
        except ImportError:
            report.add_row(library, "not installed: see the docstring of benchmarks/oracles.py")
        except Exception as error:  # any error of another library is reported
            report.add_row(library, f"refuses: {type(error).__name__}: {error}"[:80])
    show(report)


def metrics() -> None:
    cal, new = regression()
    interval = ffcp.CP(Columns(0)).calibrate(cal.x, cal.y).predict_interval(new.x, ALPHA)
    array = ends(interval)
    report = table("Metrics of the intervals of CP", "what", "ffcp", "library", "theirs")

    def compared(what: str, ours: float, library: str, ask: Callable[[], Any]) -> None:
        try:
            report.add_row(what, f"{ours:.6f}", library, f"{float(np.ravel(ask())[0]):.6f}")
        except ImportError:
            report.add_row(
                what,
                f"{ours:.6f}",
                library,
                "not installed: see the docstring of benchmarks/oracles.py",
            )

    coverage, length = (
        float(ffcp.metrics.coverage(interval, new.y)),
        ffcp.metrics.mean_length(interval),
    )
    score = ffcp.metrics.interval_score(interval, new.y, ALPHA)
    theirs, others = "mapie.metrics.regression", "deel.puncc.metrics"
    compared("coverage", coverage, "MAPIE", lambda: module(theirs).regression_coverage_score(
        new.y, array[:, :, None]))  # fmt: skip
    compared("coverage", coverage, "puncc", lambda: module(others).regression_mean_coverage(
        new.y, array[:, 0], array[:, 1]))  # fmt: skip
    compared("mean length", length, "MAPIE", lambda: module(theirs).regression_mean_width_score(
        array[:, :, None]))  # fmt: skip
    compared("mean length", length, "puncc", lambda: module(others).regression_sharpness(
        array[:, 0], array[:, 1]))  # fmt: skip
    compared("interval score", score, "MAPIE", lambda: module(theirs).regression_mwi_score(
        new.y, array[:, :, None], 1 - ALPHA))  # fmt: skip
    show(report)


def in_folds(x: Array, y: Array, folds: Array) -> ffcp.CrossConformal:
    """Return least-squares fits without each fold."""
    models = []
    for fold in range(int(folds.max()) + 1):
        training = folds != fold
        model = nn.Linear(x.shape[1], 1, bias=False).double()
        model.weight.data = torch.tensor(
            np.linalg.lstsq(x[training], y[training], rcond=None)[0][None]
        )
        models.append(model)
    return ffcp.CrossConformal(models, folds).calibrate(torch.tensor(x), torch.tensor(y))


def more() -> None:
    """Compare cross-conformal intervals and probabilities."""
    report = table(
        "Intervals from five folds, and Venn-Abers", "what", "library", "largest difference"
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(N, 3))
    y, new = x.sum(axis=1) + random.normal(size=N), random.normal(size=(NEW, 3))
    logits = x.sum(axis=1)
    labels = (random.random(N) < 1 / (1 + np.exp(-logits))).astype(int)

    def cross(library: str) -> float:
        selection = module("sklearn.model_selection")
        least_squares = module("sklearn.linear_model").LinearRegression(fit_intercept=False)
        divided = selection.KFold(5, shuffle=True, random_state=0)
        folds = np.empty(N, dtype=int)
        for number, (_, rows) in enumerate(divided.split(x)):
            folds[rows] = number
        if library == "MAPIE":
            peer = module("mapie.regression").CrossConformalRegressor(
                least_squares, confidence_level=1 - ALPHA, method="plus", cv=divided
            )
            theirs = peer.fit_conformalize(x, y).predict_interval(new)[1][:, :, 0]
        else:
            predictor = module("deel.puncc.api.prediction").BasePredictor(least_squares)
            peer = module("deel.puncc.regression").CVPlus(predictor, K=5, random_state=0)
            peer.fit(x, y)
            theirs = np.stack(peer.predict(new, alpha=ALPHA)[1:3], axis=1)
        ours = ends(in_folds(x, y, folds).predict_interval(torch.tensor(new), ALPHA))
        return float(np.abs(ours - theirs).max())

    def venn() -> float:
        peer = module("venn_abers").VennAbers()
        peer.fit(np.stack([-logits, logits], axis=1), labels)
        asked = new.sum(axis=1)
        theirs = peer.predict_proba(np.stack([-asked, asked], axis=1))[0]
        ours = ffcp.VennAbers(ffcp.Stored()).calibrate(logits, labels).predict_proba(asked)
        return float(np.abs(ours.numpy() - theirs).max())

    asked: dict[tuple[str, str], Callable[[], float]] = {
        ("CV+", "MAPIE"): lambda: cross("MAPIE"),
        ("CV+", "puncc"): lambda: cross("puncc"),
        ("Venn-Abers", "venn-abers"): venn,
    }
    for (what, library), ask in asked.items():
        try:
            report.add_row(what, library, f"{ask():.0e}")
        except ImportError:
            report.add_row(
                what, library, "not installed: see the docstring of benchmarks/oracles.py"
            )
    show(report)


class Powers:
    """Our betting functions, for the martingale of crepes."""

    def __init__(self, mirrored: bool) -> None:
        self._mirrored = mirrored

    def apply(self, p: Array) -> Array:
        epsilon = np.arange(1, 33) / 32
        shown: Array = 1 - p if self._mirrored else p
        return epsilon * shown[:, None] ** (epsilon - 1)


def martingales() -> None:
    """Compare martingales on the same p-values, of stationary and of drifting scores."""
    report = table("Logarithm of the wealth after 1,000 rows", "p-values", "bets", "ffcp", "crepes")
    random = np.random.default_rng(0)
    scores = random.normal(size=1000)
    for what, values in (("no change", scores), ("shifted by 1 at row 500", scores + DRIFT)):
        ranks = OnlineRanks(seed=0)
        p = np.array([ranks.p_value(float(one)) for one in values])
        for mirrored in (False, True):
            ours = PowerMixture(32, 0.01, mirrored)
            for one in p:
                ours.bet(one)
            try:
                peer = module("crepes.martingales")
                theirs = peer.SimpleJumper(J=0.01, bf=Powers(mirrored)).apply(p)[-1]
                said = f"{np.log(theirs):.9f}"
            except ImportError:
                said = "not installed: see the docstring of benchmarks/oracles.py"
            bets = "on large p-values" if mirrored else "on small p-values"
            report.add_row(what, bets, f"{float(ours.log_wealth):.9f}", said)
    show(report)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ffcp.FFCPWarning)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    intervals()
    sets(f"Sets of {NEW} rows, {K} classes, logits N(0, 2^2), labels drawn by them", 2.0, 1.0)
    K = 100
    sets("The same with 100 classes, logits N(0, 20^2), labels drawn at temperature 8", 20.0, 8.0)
    few()
    metrics()
    more()
    martingales()
