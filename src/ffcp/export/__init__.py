"""Write a calibrated predictor to one ONNX file, which needs neither torch nor ffcp to run.

The way in is :meth:`ffcp.predictor.Predictor.export`. A predictor becomes a function of tensors
(:mod:`~ffcp.export.steps`), that function a graph (:mod:`~ffcp.export.graph`); the graph is run and
compared with the library (:mod:`~ffcp.export.checking`) before a file is written.
"""

from ffcp.export.writing import export

__all__ = ["export"]
