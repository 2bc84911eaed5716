"""Print which modules have too many lines that no test runs; fail if one of them is of the core.

python -m pytest --cov=src/ffcp --cov-report= && python tools/covered.py

The core is everything but the integrations, whose tests start processes of their own, in
which lines are not counted.
"""

from __future__ import annotations

import sys
from pathlib import Path

from coverage import Coverage

_PACKAGE = Path(__file__).parents[1] / "src/ffcp"
_LEAST = 95.0  # percent of a module's lines
_INTEGRATIONS = {"cli", "distributed", "export", "ray", "sklearn", "tables"}


def below(measured: Coverage) -> dict[Path, str]:
    """Return the modules below the limit, each with its coverage and the lines not run."""
    found = {}
    for file in sorted(_PACKAGE.rglob("*.py")):
        _, lines, _, missing, ranges = measured.analysis2(str(file))
        share = 100 * (1 - len(missing) / max(1, len(lines)))
        if share < _LEAST:
            found[file.relative_to(_PACKAGE)] = f"{share:5.1f} %, not {ranges}"
    return found


def of_core(module: Path) -> bool:
    """Whether the module is not an integration."""
    return module.parts[0] not in _INTEGRATIONS


def main() -> int:
    """Print one line per module below the limit; return 1 if one is of the core."""
    measured = Coverage()
    measured.load()
    if not measured.get_data().measured_files():
        print("No line was measured: run the tests with --cov=src/ffcp --cov-report= first.")
        return 1
    found = below(measured)
    print(f"Lines run by tests: {len(found)} modules of ffcp are under {_LEAST:g} %.")
    for module, report in found.items():
        print(f"  {'core!' if of_core(module) else '     '} {module!s:32} {report}")
    core = sum(map(of_core, found))
    if core:
        print(f"{core} of them are of the core: test the lines named, or delete them.")
    return 1 if core else 0


if __name__ == "__main__":
    sys.exit(main())
