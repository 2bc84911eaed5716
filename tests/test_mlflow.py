"""A model of MLflow: loaded in another process, at any alpha, with no pickle among its files."""

from __future__ import annotations

import pickle
import pickletools
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ffcp
from tests.docs.pages import ROOT

pd = pytest.importorskip("pandas")
pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
pytest.importorskip("sklearn")

EXAMPLE = ROOT / "examples" / "mlflow_model.py"
LOADS = """
import sys
import mlflow, pandas
model = mlflow.pyfunc.load_model(sys.argv[1] + "/model")
rows = pandas.read_csv(sys.argv[1] + "/new.csv")
model.predict(rows).to_csv(sys.argv[1] + "/default.csv", index=False)
model.predict(rows, params={"alpha": 0.2}).to_csv(sys.argv[1] + "/wanted.csv", index=False)
print("ffcp" in sys.modules, model.metadata.signature.params.to_dict())
"""

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore"),  # MLflow's own, of many kinds
    pytest.mark.usefixtures("torch_that_exports"),
]


def is_pickle(file: Path) -> bool:
    """Whether all bytes of a file are a pickle, or it is an archive, as torch.save writes."""
    if zipfile.is_zipfile(file):
        return True
    try:
        *_, (last, _, place) = pickletools.genops(file.read_bytes())
    except Exception:
        return False
    return last.name == "STOP" and place == file.stat().st_size - 1


def test_pickles_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps({"a": [1, 2]}))
    torch.save(torch.zeros(2), tmp_path / "b")
    (tmp_path / "c").write_text('{"a": 1}')
    assert [is_pickle(tmp_path / name) for name in "abc"] == [True, True, False]


@pytest.fixture(scope="module")
def table() -> Any:
    from sklearn.datasets import load_diabetes

    return load_diabetes(as_frame=True).frame.sample(frac=1, random_state=0)


def fit_folder(table: Any, folder: Path) -> tuple[dict[str, str], Any]:
    pytest.importorskip("tabm")
    from ffcp import tables

    fitted = tables.fit(table[:400], "target", minutes=0.02, seed=0)
    fitted.save(folder / "patients.ffcp")
    return {"fit": str(folder / "patients.ffcp")}, fitted.predict


def network(table: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    x = torch.tensor(table[table.columns[:10]].to_numpy("float32"))
    return ffcp.FFCP(model, "0").calibrate(x[:400], table["target"][:400].to_numpy())


def predictor_file(table: Any, folder: Path) -> tuple[dict[str, str], Any]:
    from safetensors.torch import save_model

    predictor = network(table)
    save_model(predictor.model, folder / "weights.safetensors")
    predictor.save(folder / "calibration.safetensors")
    files = {name: str(folder / f"{name}.safetensors") for name in ("weights", "calibration")}
    return files, lambda rows, alpha: predictor.predict_interval(
        rows.to_numpy("float32"), alpha
    ).to_frame()


def onnx_file(table: Any, folder: Path) -> tuple[dict[str, str], Any]:
    pytest.importorskip("onnxruntime")
    predictor = network(table)
    x = table[table.columns[:10]].to_numpy("float32")
    predictor.export(folder / "intervals.onnx", x[:400], alphas=(0.1, 0.2))
    files = {"onnx": str(folder / "intervals.onnx")}
    return files, lambda rows, alpha: predictor.predict_interval(
        rows.to_numpy("float32"), alpha
    ).to_frame()


@pytest.mark.parametrize("made", [fit_folder, predictor_file, onnx_file])
def test_a_model_is_loaded_in_another_process_without_a_pickle(
    made: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    rows = table[400:].drop(columns="target")
    files, expected = made(table, tmp_path)
    options = {"signature": runpy.run_path(str(EXAMPLE))["signature"](rows)}
    mlflow.pyfunc.save_model(
        tmp_path / "model", python_model=str(EXAMPLE), artifacts=files, pip_requirements=["ffcp"],
        **options,
    )  # fmt: skip
    kept = [file for file in (tmp_path / "model").rglob("*") if file.is_file()]
    assert len(kept) >= 6
    assert [file.name for file in kept if is_pickle(file)] == []

    rows.to_csv(tmp_path / "new.csv", index=False)
    command = [sys.executable, "-c", LOADS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    has_ffcp, params = done.stdout.strip().split(" ", 1)
    assert has_ffcp == str(made is not onnx_file)
    assert "'alpha'" in params
    assert "'default': 0.1" in params
    for name, alpha in (("default", 0.1), ("wanted", 0.2)):
        found = pd.read_csv(tmp_path / f"{name}.csv")
        mine = expected(rows, alpha)[list(found.columns)].to_numpy()
        assert list(found.columns) == ["prediction", "lower", "upper"]
        assert np.allclose(found, mine, rtol=1e-5), name


def test_an_alpha_that_was_not_exported_is_refused(table: Any, tmp_path: Path) -> None:
    files, _ = onnx_file(table, tmp_path)
    opened = runpy.run_path(str(EXAMPLE))["opened"](**files)
    with pytest.raises(ValueError, match=r"alpha=0\.05.*lower_0\.2"):
        opened(table[400:].drop(columns="target"), 0.05)
