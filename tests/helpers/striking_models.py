"""A model and data in which something goes wrong, on one node or on all, once a test says so.

The test writes a `Strike` to the file that STRIKE_FILE names. The first node that comes to the
place is struck, as often as is said; which that is, is in a file beside it.
"""

import os
import resource
import signal
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import torch
from torch import Tensor, nn

from helpers import user_models


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong.

    Attributes:
        times: on a node.
    """

    what: Literal["memory", "unreadable", "bus", "allocation", "mistake"]
    place: Literal["data", "model"] = "model"
    times: int = 1000
    is_everywhere: bool = False


def strike(place: str) -> None:
    """Goes wrong if it is this node's turn."""
    path = Path(os.environ.get("STRIKE_FILE", "/nowhere"))
    with suppress(FileNotFoundError):
        told = msgspec.json.decode(path.read_bytes(), type=Strike)
        if told.place == place and _is_struck(path, told):
            _go_wrong(told.what)


def _is_struck(path: Path, told: Strike) -> bool:
    """Whether this node is the one, and has not had enough; an agent outlives its workers."""
    node = str(os.getppid())
    victim = path.with_suffix(f".{node}" if told.is_everywhere else ".victim")
    with suppress(FileExistsError), victim.open("x") as file:
        file.write(node)
    if victim.read_text() != node:
        return False
    count = path.with_suffix(f".{node}.count")
    number = int(count.read_text()) if count.exists() else 0
    count.write_text(str(number + 1))
    return number < told.times


def _go_wrong(what: str) -> None:
    match what:
        case "memory":
            raise MemoryError("no memory for this")
        case "unreadable":
            raise OSError(5, "Input/output error", "data.bin")
        case "bus":
            os.kill(os.getpid(), signal.SIGBUS)
        case "allocation":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
            try:
                torch.ones(1 << 30)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        case "mistake":
            raise ValueError("a mistake in the user's model")


class _Striking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        strike("model")
        return x


def sequential() -> nn.Sequential:
    """The classifier of ten layers, and one that goes wrong."""
    layers = list(user_models.sequential())
    return nn.Sequential(*layers[:4], _Striking(), *layers[4:])


class _StrikingPoints:
    def __len__(self) -> int:
        return len(user_models.points())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        strike("data")
        sample: tuple[Tensor, Tensor] = user_models.points()[index]
        return sample


def points() -> _StrikingPoints:
    """The data that may not be readable."""
    return _StrikingPoints()


def _wait_group() -> None:
    leader = Path(f"/proc/{os.getpgrp()}")
    while leader.exists():
        time.sleep(0.05)


def forking_points() -> _StrikingPoints:
    """The data, with a process that helps and, like a pool's, does not end with its rank."""
    helper = get_context("fork").Process(target=_wait_group, daemon=True)
    helper.start()
    path = Path(os.environ.get("STRIKE_FILE", "/nowhere"))
    if path.parent.exists():
        path.with_suffix(f".{helper.pid}.helper").touch()
    return _StrikingPoints()


def living_helpers(path: Path) -> list[int]:
    """The helpers on the node that was struck.

    Args:
        path: file with the strike.
    """
    victim = int(path.with_suffix(".victim").read_text())
    helpers = []
    for each in path.parent.glob("*.helper"):
        pid = int(each.suffixes[-2][1:])
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            is_dead = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
            if os.getpgid(pid) == victim and not is_dead:
                helpers.append(pid)
    return helpers


class _GrowingPoints(_StrikingPoints):
    def __len__(self) -> int:
        has_grown = Path(os.environ.get("STRIKE_FILE", "/nowhere")).exists()
        return super().__len__() + has_grown


def growing_points() -> _GrowingPoints:
    """The data, of which there are more once a test says so."""
    return _GrowingPoints()


class _SpoiltPoints(_StrikingPoints):
    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return (*sample, 0) if Path(os.environ.get("STRIKE_FILE", "/nowhere")).exists() else sample


def spoilt_points() -> _SpoiltPoints:
    """The data, whose samples are malformed once a test says so."""
    return _SpoiltPoints()
