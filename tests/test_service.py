"""The service of examples/service.py: right for many clients at once, and its JSON is valid."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ffcp
from tests.conftest import normal
from tests.docs.pages import ROOT

pytest.importorskip("fastapi", reason="fastapi is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("torch_that_exports")]
SCRIPT = ROOT / "examples" / "service.py"
EXAMPLE: Any = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
CLIENTS, REQUESTS, ALPHAS = 16, 12, (0.1, 0.2)
X = normal(300, 5, seed=0)
ALONE = """
import json, runpy, sys
example = runpy.run_path(sys.argv[1])
answer = example["by_onnx"](sys.argv[2])
import httpx
with example["running"](example["service"](answer, columns=5)) as address:
    found = httpx.post(address + "/interval", json={"rows": [[0.0] * 5]}, timeout=30).json()
print(json.dumps([found["lower"], "torch" in sys.modules, "ffcp" in sys.modules]))
"""


def calibrated(rows: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    return ffcp.FFCP(model, "0").calibrate(X[:rows], normal(300, seed=1)[:rows])


@pytest.fixture(scope="module")
def predictor() -> Any:
    return calibrated(250)


@pytest.fixture(scope="module")
def file(predictor: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    path = tmp_path_factory.mktemp("service") / "intervals.onnx"
    predictor.export(path, X[:250], alphas=ALPHAS)
    return path


@pytest.fixture(params=["predictor", "file"])
def answer(request: pytest.FixtureRequest) -> Any:
    made = request.getfixturevalue(request.param)
    return EXAMPLE.by_predictor(made) if request.param == "predictor" else EXAMPLE.by_onnx(made)


def strict(text: str) -> Any:
    """Read JSON as others do, who know no Infinity and no NaN."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_sixteen_clients_at_once_get_their_own_intervals(answer: Any, predictor: Any) -> None:
    def client(number: int) -> int:
        random = np.random.default_rng(number)
        with httpx.Client(timeout=60) as session:
            for _ in range(REQUESTS):
                rows = X[random.integers(0, 300, random.integers(1, 6))]
                alpha = float(random.choice(ALPHAS))
                question = {"rows": rows.tolist(), "alpha": alpha}
                got = session.post(f"{address}/interval", json=question)
                assert got.status_code == 200, got.text
                found, mine = strict(got.text), predictor.predict_interval(rows, alpha)
                assert found["alpha"] == alpha
                for name in ("prediction", "lower", "upper"):
                    assert found[name] == pytest.approx(getattr(mine, name).tolist(), rel=1e-4)
        return number

    served = EXAMPLE.running(EXAMPLE.service(answer, columns=5))
    with served as address, ThreadPoolExecutor(CLIENTS) as clients:
        assert list(clients.map(client, range(CLIENTS))) == list(range(CLIENTS))
    with pytest.raises(httpx.TransportError):  # it has stopped
        httpx.get(address, timeout=5)


@pytest.mark.filterwarnings("ignore::ffcp.FFCPWarning")
@pytest.mark.parametrize("exported", [False, True])
def test_infinite_ends_are_null_and_have_a_reason(exported: bool, tmp_path: Path) -> None:
    few = calibrated(5)  # too few for 90 %
    if exported:
        few.export(tmp_path / "few.onnx", X[:250], alphas=ALPHAS)
    answer = EXAMPLE.by_onnx(tmp_path / "few.onnx") if exported else EXAMPLE.by_predictor(few)
    with EXAMPLE.running(EXAMPLE.service(answer, columns=5)) as address:
        got = httpx.post(f"{address}/interval", json={"rows": X[:2].tolist()}, timeout=60)
    found = strict(got.text)
    assert found["lower"] == found["upper"] == [None, None]
    assert "infinite" in found["reason"]
    assert found["prediction"] == pytest.approx(few.predict_interval(X[:2]).prediction.tolist())


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"rows": [[1.0, 2.0]]}, "5 numbers"),
        ({"rows": []}, "5 numbers"),
        ({"rows": [["NaN", 1, 1, 1, 1]]}, "finite"),
        ({"rows": [[0.0] * 5], "alpha": 1.5}, "alpha"),
    ],
)
def test_a_bad_question_is_refused_with_its_reason(answer: Any, question: Any, words: str) -> None:
    with EXAMPLE.running(EXAMPLE.service(answer, columns=5)) as address:
        got = httpx.post(f"{address}/interval", json=question, timeout=60)
    assert got.status_code == 422
    assert words in got.text


def test_the_onnx_file_is_served_without_torch(file: Path, predictor: Any) -> None:
    command = [sys.executable, "-c", ALONE, str(SCRIPT), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lower, *imported = json.loads(done.stdout)
    assert imported == [False, False]
    mine = predictor.predict_interval(torch.zeros(1, 5)).lower.tolist()
    assert lower == pytest.approx(mine, rel=1e-4)
