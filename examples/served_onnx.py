"""One file for a server: a band over HTTP, without torch (goes with docs/deploy.md).

The data is scikit-learn's own: the course of diabetes in a year, for 442 patients.
"""

import json
import subprocess
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from tempfile import TemporaryDirectory


def serve(path: str) -> None:
    """Answer rows with bands; neither torch nor ffcp is imported in this process."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)

    class IntervalPredictor(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ends = session.run(["lower", "upper"], {"x": rows})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([end.tolist() for end in ends]).encode())

    server = HTTPServer(("127.0.0.1", 0), IntervalPredictor)
    print(server.server_port, "torch" in sys.modules or "ffcp" in sys.modules, flush=True)
    server.serve_forever()


def main() -> None:
    import torch
    from sklearn.datasets import load_diabetes

    import ffcp
    from ffcp_paper.networks import mlp
    from ffcp_paper.training import train

    torch.manual_seed(0)
    x, y = (torch.from_numpy(array).float() for array in load_diabetes(return_X_y=True))
    order = torch.randperm(len(y))
    x, y = 20 * x[order], y[order, None] / 100
    model = train(mlp(10), x[:200], y[:200], epochs=50)
    predictor = ffcp.FFCP(model, feature="3").calibrate(x[200:350], y[200:350])
    with TemporaryDirectory() as folder:
        predictor.export(file := f"{folder}/band.onnx", x[200:350], alphas=(0.1,))
        command = [sys.executable, __file__, file]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            port, heavy = server.stdout.readline().split()
            asked = json.dumps(x[350:].tolist()).encode()
            answer = urllib.request.urlopen(f"http://127.0.0.1:{port}", asked).read()
            server.kill()
    lower, upper = torch.tensor(json.loads(answer))
    print(f"coverage {ffcp.metrics.coverage((lower, upper), y[350:])}; torch there: {heavy}")


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()
