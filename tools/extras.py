"""Install each extra alone in a clean environment and use it: ``make extras``.

Builds the wheel and the source distribution, lets twine check both, and installs the wheel with
one extra at a time, with the versions of constraints.txt. With names only those: ``none`` is the
library without extras.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = """
import torch, ffcp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
x, y = torch.randn(200, 3), torch.randn(200)
predictor = ffcp.CP(model).calibrate(x, y)
interval = predictor.predict_interval(x[:5])
"""
TABLE = """
import pathlib, subprocess, sys
lines = [f"{i % 17},{'ab'[i % 2]},{i % 17 + i % 5}" for i in range(300)]
pathlib.Path("t.csv").write_text("\\n".join(["size,kind,price", *lines]))
for call in (["fit", "t.csv", "--target", "price", "--minutes", "0.02"],
             ["predict", "t.ffcp", "t.csv"], ["show", "t.ffcp"]):
    subprocess.run([sys.executable, "-m", "ffcp.cli", *call], check=True)
assert pathlib.Path("t.intervals.csv").exists()
"""
RAY = """
import ray, ffcp.ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
rows = ray.data.from_items([{"x": row.tolist(), "y": float(t)} for row, t in zip(x, y)])
assert len(ffcp.ray.calibrate(ffcp.CP(model), rows, x="x", y="y").calibration) == 200
"""
USES = {
    "none": "predictor.save('c.safetensors'); ffcp.load('c.safetensors', model)",
    "cli": "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-m', 'ffcp.cli', 'demo', '--epochs', '2'], check=True)",
    "frames": "assert list(interval.to_frame().columns) == ['prediction', 'lower', 'upper']",
    "plots": "import matplotlib; matplotlib.use('agg'); interval.plot()",
    "tables": TABLE,
    "sklearn": "from sklearn.linear_model import Ridge\n"
    "from ffcp.sklearn import ConformalRegressor\n"
    "ConformalRegressor(Ridge()).fit(x.numpy(), y.numpy()).predict_interval(x.numpy())",
    "trees": "ffcp.Learned(model, learner='boosting', seed=0).calibrate(x, y).predict_interval(x)",
    "ray": RAY,
    "export": "predictor.export('intervals.onnx', x[:5])",
    "docs": "import furo, myst_nb, myst_parser, sphinx",
}


def call(*words: object) -> None:
    """Run a command; end with its output if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")


def environment(folder: Path) -> Path:
    """Create a virtual environment, and return its Python."""
    venv.create(folder, with_pip=True)
    return folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def install_and_use(extra: str, wheel: Path) -> float:
    """Install the wheel with one extra, and use it; return the seconds."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        python, given = environment(Path(name) / "env"), ROOT / "constraints.txt"
        what = str(wheel) if extra == "none" else f"{wheel}[{extra}]"
        call(python, "-m", "pip", "install", "--quiet", "--constraint", given, what)
        script = Path(name) / "use_extra.py"
        script.write_text(f"import os\nos.chdir({name!r})\n{START}{USES[extra]}\n")
        call(python, script)
    return time.perf_counter() - begin


def main() -> None:
    """Build, check and install."""
    with tempfile.TemporaryDirectory() as name:
        python, out = environment(Path(name) / "env"), Path(name) / "dist"
        call(python, "-m", "pip", "install", "--quiet", "build", "twine")
        call(python, "-m", "build", "--outdir", out, ROOT)
        call(python, "-m", "twine", "check", "--strict", *out.iterdir())
        print("built and checked:", ", ".join(sorted(file.name for file in out.iterdir())))
        (wheel,) = out.glob("*.whl")
        for extra in sys.argv[1:] or USES:
            print(
                f"{extra}: installed and used in {install_and_use(extra, wheel):.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
