"""The picture of docs/ARCHITECTURE.md shows the imports that there are."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_the_picture_is_drawn_from_the_imports() -> None:
    """A picture of yesterday's folders misleads; `make docs` draws it anew."""
    script = [sys.executable, str(DOCS / "draw_architecture.py")]
    drawn = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)

    assert not drawn.stderr
    assert drawn.stdout == (DOCS / "architecture.svg").read_text(encoding="utf-8"), "make docs"
