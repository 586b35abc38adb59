"""The processes that own memory for loops of tests."""

from pathlib import Path

import psutil


def keepers(place: Path) -> list[psutil.Process]:
    """The processes that own memory below a directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "planaria.torchrun.keeper" in words and any(str(place) in word for word in words):
            found.append(process)
    return found
