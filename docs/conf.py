"""The documentation site, made by Sphinx: ``make docs``. See these_pages.md for why and how."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import ffcp

project = "ffcp"
copyright = "the authors of ffcp, MIT licence"
version = release = ffcp.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/**/*.txt"]

html_theme = "furo"
html_title = "ffcp"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sphinx = html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style, pygments_dark_style = "friendly", "monokai"

nb_execution_mode = "off"  # notebooks have their outputs: `make notebooks`
myst_heading_anchors = 4  # so that links may point at headings, as on a code host

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True  # attributes in a list: their members would be described twice
napoleon_use_rtype = False
python_maximum_signature_line_length = 88


def skip(_app: Any, _what: str, name: str, member: Any, skipped: bool, _options: Any) -> bool:
    """Leave out inherited members: fields of named tuples, and metadata routing."""
    field = (getattr(member, "__doc__", None) or "").startswith("Alias for field")
    return skipped or field or (name.startswith("set_") and name.endswith("_request"))


def setup(app: Any) -> None:
    """Register the functions above."""
    app.connect("autodoc-skip-member", skip)
