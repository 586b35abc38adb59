"""Directory and names of the files that planaria keeps for a user's jobs."""

import hashlib
import os
from pathlib import Path
from typing import Final

NAME_BYTES_MAX: Final = 60
_DIGEST_LETTERS: Final = 8


def state_directory() -> Path | None:
    """The directory of planaria in the user's state directory.

    None if no home is known, as in a container whose user has no name.
    """
    for base in (os.environ.get("XDG_STATE_HOME", ""), "~/.local/state"):
        path = Path(os.path.expanduser(base))
        if path.is_absolute():
            return path / "planaria"
    return None


def plain_name(job: str) -> str:
    """The name of a job as a part of file names; a name that is too long ends with its hash."""
    letters = "".join(letter if letter.isalnum() else "_" for letter in job)
    encoded = letters.encode()
    if len(encoded) <= NAME_BYTES_MAX:
        return letters
    digest = hashlib.sha256(encoded).hexdigest()[:_DIGEST_LETTERS]
    begin = encoded[: NAME_BYTES_MAX - 1 - _DIGEST_LETTERS].decode(errors="ignore")
    return f"{begin}_{digest}"
