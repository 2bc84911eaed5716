"""A service that answers rows with intervals, in JSON, by FastAPI: goes with docs/service.md.

By a predictor, and by its ONNX file without torch. Sixteen clients ask at once; then it stops.
The data is scikit-learn's own: the course of diabetes in a year, for 442 patients.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, FiniteFloat

Answer = Callable[[Any, float], dict[str, Any]]


class Question(BaseModel):
    rows: list[list[FiniteFloat]]
    alpha: float = 0.1


def service(answer: Answer, columns: int) -> FastAPI:
    """Return the service of a function of rows and alpha."""
    app = FastAPI()

    @app.post("/interval")
    def interval(question: Question) -> dict[str, Any]:  # no `async`: each runs in its thread
        if not question.rows or any(len(row) != columns for row in question.rows):
            raise ValueError(f"expected rows of {columns} numbers")
        return answer(np.array(question.rows, dtype=np.float32), question.alpha)

    @app.exception_handler(ValueError)
    def refuse(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, status_code=422)

    return app


def by_predictor(predictor: Any) -> Answer:
    return lambda rows, alpha: predictor.predict_interval(rows, alpha).to_dict()


def by_onnx(path: str) -> Answer:
    """Read a file that was exported with several alphas; neither torch nor ffcp is needed."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    known = {output.name for output in session.get_outputs()}

    def answer(rows: Any, alpha: float) -> dict[str, Any]:
        names = [f"lower_{alpha:g}", f"upper_{alpha:g}", "prediction"]
        if not known.issuperset(names):
            raise ValueError(f"this file was not exported with alpha={alpha:g}")
        found = session.run(names, {"x": rows})
        lower, upper, point = (
            [v if math.isfinite(v) else None for v in one.ravel().tolist()] for one in found
        )
        reason = "null is an infinite end" if None in lower + upper else None
        ends = {"lower": lower, "upper": upper, "prediction": point}
        return {**ends, "alpha": alpha, "reason": reason}

    return answer


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """Serve on a free port of this machine, in a thread; `uvicorn` does it from a shell."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    import httpx
    import torch
    from sklearn.datasets import load_diabetes

    import ffcp
    from ffcp_paper.networks.regression import mlp
    from ffcp_paper.training.regression import train

    torch.manual_seed(0)
    x, y = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
    order = torch.randperm(len(y))
    x, y = 20 * x[order], y[order] / 100
    model = train(mlp(10), x[:200], y[:200, None], epochs=50)
    predictor = ffcp.FFCP(model, feature="3").calibrate(x[200:350], y[200:350])
    with TemporaryDirectory() as folder:
        predictor.export(f"{folder}/intervals.onnx", x[200:350], alphas=(0.1, 0.2))
        file = by_onnx(f"{folder}/intervals.onnx")
        for name, answer in {"predictor": by_predictor(predictor), "ONNX file": file}.items():
            with running(service(answer, columns=10)) as address, httpx.Client() as client:

                def ask(row: Any) -> dict[str, Any]:
                    question = {"rows": [row.tolist()], "alpha": 0.2}
                    return client.post(f"{address}/interval", json=question).json()

                with ThreadPoolExecutor(16) as clients:
                    found = list(clients.map(ask, x[350:]))
            ends = [torch.tensor([one[end][0] for one in found]) for end in ("lower", "upper")]
            share = ffcp.metrics.coverage((ends[0], ends[1]), y[350:])
            print(f"{name:9}  {len(found)} answers to 16 clients, coverage {share} of 80%")


if __name__ == "__main__":
    main()
