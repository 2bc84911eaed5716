"""Prediction sets for text: of which library is a docstring? Goes with docs/classification.md.

The text is real: the first words of docstrings of installed libraries.
"""

import ast
import importlib.util
import random
import re
import warnings
from pathlib import Path

import torch
from torch import nn

import ffcp

LIBRARIES = ("matplotlib", "numpy", "pandas", "scipy", "sklearn", "torch")
EACH, LENGTH, WIDTH, TRAIN, CALIBRATED, ALPHA = 700, 32, 48, 2700, 3450, 0.1


def docstrings(library: str) -> list[str]:
    """Read the first words of docstrings from the files of a library, without importing it."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise SystemExit(f"{library} is not installed: pip install {library}")
    files = sorted(Path(found.origin).parent.rglob("*.py"))
    random.Random(0).shuffle(files)
    texts: dict[str, None] = {}  # in their order, each once
    while files and len(texts) < EACH:
        for node in ast.walk(ast.parse(files.pop().read_text(errors="ignore"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                words = re.findall(r"[a-z_]+", (ast.get_docstring(node) or "").lower())
                texts.update({" ".join(words[:LENGTH]): None} if len(words) >= 12 else {})
    return list(texts)[:EACH]


warnings.simplefilter("ignore", SyntaxWarning)  # of the libraries' own files
torch.manual_seed(0)
rows = [(text.split(), label) for label, name in enumerate(LIBRARIES) for text in docstrings(name)]
random.Random(0).shuffle(rows)
number = {word: 1 + place for place, word in enumerate({w: 0 for t, _ in rows[:TRAIN] for w in t})}
x = torch.tensor([[number.get(w, 0) for w in t] + [0] * (LENGTH - len(t)) for t, _ in rows])
y = torch.tensor([label for _, label in rows])
words = nn.Embedding(1 + len(number), WIDTH)
layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, 0.3, batch_first=True)
head = (nn.AdaptiveAvgPool2d((1, WIDTH)), nn.Flatten(), nn.Dropout(0.5), nn.Linear(WIDTH, 6))
model = nn.Sequential(words, layer, *head)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
for part in torch.cat([torch.randperm(TRAIN) for _ in range(6)]).split(64):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()
predictor = ffcp.LAC(model).calibrate(x[TRAIN:CALIBRATED], y[TRAIN:CALIBRATED])
found = predictor.predict_set(x[CALIBRATED:], ALPHA)
print(f"coverage {found.coverage(y[CALIBRATED:])}, {found.sizes.double().mean():.2f} labels a set")
for text, label, row in [(*rows[CALIBRATED + i], i) for i in range(6)]:
    labels = " or ".join(LIBRARIES[one] for one in found.labels[row])
    print(f"{LIBRARIES[label]:10}  {labels:34}  {' '.join(text)[:60]}")
