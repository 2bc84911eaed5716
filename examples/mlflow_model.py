"""A model of MLflow that returns prediction intervals, without a pickle: goes with docs/mlflow.md.

This file is the code of the model: MLflow copies it, and the files that it reads. These are the
folder of `ffcp fit`, or an ONNX file, or weights and a calibration. Data: Friedman's, made.
"""

from tempfile import TemporaryDirectory

import mlflow
import pandas as pd
from mlflow.models import ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

COLUMNS = ["prediction", "lower", "upper"]


class Intervals(mlflow.pyfunc.PythonModel):
    """Rows of a frame in; their prediction, lower and upper end out, at any alpha."""

    def load_context(self, context):
        self.predict_interval = opened(**context.artifacts)

    def predict(self, context, model_input: pd.DataFrame, params=None):
        return self.predict_interval(model_input, params["alpha"])[COLUMNS]


def opened(fit=None, onnx=None, weights=None, calibration=None):
    """Return a function of rows and alpha, from whichever files there are."""
    if fit is not None:
        from ffcp import tables

        return tables.load(fit).predict
    if onnx is not None:
        import onnxruntime  # neither torch nor ffcp is imported

        session = onnxruntime.InferenceSession(onnx)
        return lambda rows, alpha: from_onnx(session, rows, alpha)
    import ffcp

    predictor = ffcp.load(calibration, network(weights))
    return lambda rows, alpha: predictor.predict_interval(rows.to_numpy("float32"), alpha).to_frame(
        rows.index
    )


def from_onnx(session, rows, alpha):
    names = ["prediction", f"lower_{alpha:g}", f"upper_{alpha:g}"]
    known = [output.name for output in session.get_outputs()]
    if names[1] not in known:
        raise ValueError(f"this file was not exported with alpha={alpha:g}: it has {known}")
    found = session.run(names, {"x": rows.to_numpy("float32")})
    return pd.DataFrame({n: v.ravel() for n, v in zip(COLUMNS, found, strict=True)}, rows.index)


def network(weights):
    """Build the network, and load its weights."""
    from safetensors.torch import load_model
    from torch import nn

    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    load_model(model, weights)
    return model


def signature(columns):
    """Describe the columns of a frame, and alpha, which is 0.1 if it is not given."""
    return ModelSignature(
        inputs=Schema([ColSpec("double", name) for name in columns]),
        outputs=Schema([ColSpec("double", name) for name in COLUMNS]),
        params=ParamSchema([ParamSpec("alpha", "double", 0.1)]),
    )


def main():
    from sklearn.datasets import make_friedman1

    from ffcp import tables

    x, y = make_friedman1(4000, noise=1.0, random_state=0)
    table = pd.DataFrame(x).rename(columns="x{}".format).assign(target=y)
    rows, y = table[3000:].drop(columns="target"), table["target"][3000:]
    with TemporaryDirectory() as folder:
        tables.fit(table[:3000], "target", minutes=0.1).save(f"{folder}/rows.ffcp")
        options = {"signature": signature(rows), "pip_requirements": ["ffcp[tables]"]}
        files = {"fit": f"{folder}/rows.ffcp"}
        mlflow.pyfunc.save_model(
            f"{folder}/model", python_model=__file__, artifacts=files, **options
        )
        model = mlflow.pyfunc.load_model(f"{folder}/model")  # here, or on another machine
        for alpha in (0.1, 0.2):
            found = model.predict(rows, params={"alpha": alpha})
            share = y.between(found["lower"], found["upper"]).mean()
            width = (found["upper"] - found["lower"]).mean()
            print(f"alpha={alpha}: {share:.1%} of {len(y)} rows covered, mean width {width:.2f}")


mlflow.models.set_model(Intervals())
if __name__ == "__main__":
    main()
