"""Writes train.bin and val.bin of a text, as nanoGPT's scripts do: one uint16 for each character.

python examples/nanogpt/prepare.py [TEXT] [DIRECTORY]
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np


def main(text_path: str = "", directory: str = "") -> None:
    """The text is Python's own documentation, if there is no other."""
    text = Path(text_path).read_bytes() if text_path else "\n".join(topics.values()).encode()
    tokens = np.frombuffer(text, dtype=np.uint8).astype("<u2")
    place = Path(directory or Path(__file__).parent)
    cut = len(tokens) * 9 // 10
    for name, part in (("train.bin", tokens[:cut]), ("val.bin", tokens[cut:])):
        part.tofile(place / name)
        print(f"{place / name}: {len(part)} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
