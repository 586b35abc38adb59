"""A gate before the saves, by which faults make their place slow or full."""

from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.command import wait_for
from planaria.checkpoint.disk.gate import Gate, GatedStorage
from planaria.checkpoint.disk.storage import Directory, may_pass
from planaria.errors import CheckpointError, UnreadableError, UnwritableError

REQUESTS: list[tuple[Callable[[GatedStorage], object], type[CheckpointError]]] = [
    (lambda storage: storage.versions(), UnreadableError),
    (lambda storage: storage.entries("1-0"), UnreadableError),
    (lambda storage: storage.read("1-0/a"), UnreadableError),
    (lambda storage: storage.write("1-0/b", b"b", may_write=lambda: True), UnwritableError),
    (lambda storage: storage.create("1-0/c", b"c"), UnwritableError),
    (lambda storage: storage.remove("1-0", ["1-0/a"]), UnwritableError),
]


@pytest.mark.parametrize(("request_of", "error"), REQUESTS)
def test_a_gate_refuses_as_a_full_disk_does_and_only_for_a_while(
    request_of: Callable[[GatedStorage], object], error: type[CheckpointError], tmp_path: Path
) -> None:
    """Who can wait is told that it may pass."""
    gate = Gate()
    storage = GatedStorage(Directory(tmp_path), gate)
    storage.write("1-0/a", b"a", may_write=lambda: True)
    gate.refuse(3600.0)
    with pytest.raises(error) as refusal:
        request_of(storage)
    assert may_pass(refusal.value)
    assert storage.where("1-0/a") == str(tmp_path / "1-0" / "a")
    gate.refuse(0.01)

    def passes() -> bool:
        try:
            request_of(storage)
        except error:
            return False
        return True

    wait_for(passes, what="the gate lets requests pass")
