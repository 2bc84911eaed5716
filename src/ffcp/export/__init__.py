"""Export of a calibrated predictor to one ONNX file, which runs without torch and ffcp.

Users call :meth:`ffcp.predictor.Predictor.export`. A predictor is turned into a function of tensors
(:mod:`~ffcp.export.steps`), and the function into a graph (:mod:`~ffcp.export.graph`); the graph is
run and compared with the library (:mod:`~ffcp.export.checking`) before a file is written.
"""

from ffcp.export.writing import export

__all__ = ["export"]
