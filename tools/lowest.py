"""Print the lowest version of every package that the two pyproject.toml name, as constraints.

python tools/lowest.py > lowest.txt && pip install -c lowest.txt -e '.[dev]' -e './paper[dev]'
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

_ROOT = Path(__file__).parents[1]
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*>=\s*([0-9][0-9.]*)")


def lowest(*files: Path) -> dict[str, str]:
    """Read the lower bounds; of two for one package the higher, as pip would."""
    found: dict[str, str] = {}
    for file in files:
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for line in (*project["dependencies"], *(one for extra in extras for one in extra)):
            if (named := _NAMED.match(line)) is not None:
                name, version = named.group(1).lower().replace("_", "-"), named.group(2)
                found[name] = max(found.get(name, "0"), version, key=_numbers)
    return found


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    for name, version in sorted(
        lowest(_ROOT / "pyproject.toml", _ROOT / "paper/pyproject.toml").items()
    ):
        # The newest fix of the lowest version: that is what pip would take for name~=version.
        sys.stdout.write(
            f"{name}=={version}{'.0' * (1 - version.count('.'))}.*\n"
            if version.count(".") < 2
            else f"{name}=={version}\n"
        )
