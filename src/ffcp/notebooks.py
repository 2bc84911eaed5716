"""What notebooks show of an object: the lines that ``print`` writes."""

from __future__ import annotations

import html


class ShownAsText:
    """Shows in notebooks what ``print`` writes, with its columns in place."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
