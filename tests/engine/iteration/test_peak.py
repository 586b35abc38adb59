"""How much memory a process has used at most, also where the kernel does not tell."""

import errno
import logging
from pathlib import Path

import numpy as np
import psutil
import pytest

from planaria.engine.iteration.memory_peaks import ResidentPeak

NUM_BYTES = 64 << 20  # More than malloc keeps for itself.


@pytest.mark.parametrize("status", ["VmHWM:\t5 kB\n", "VmRSS:\t5 kB\n"], ids=["refused", "no peak"])
def test_a_kernel_that_measures_no_peak_ends_nothing_and_is_told_of_once(
    status: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """gVisor has no clear_refs, and containers may have a /proc that is read-only."""
    if "VmHWM" in status:
        (tmp_path / "clear_refs").mkdir()  # No file: not even root can write to it.
    (tmp_path / "status").write_text(status)
    peak = ResidentPeak(tmp_path)
    with caplog.at_level(logging.WARNING):
        peak.reset()
        before_bytes = peak.num_bytes()
        held = np.ones(NUM_BYTES, dtype=np.uint8)
        after_bytes = peak.num_bytes()
        peak.reset()

    assert after_bytes >= before_bytes + held.nbytes // 2
    (record,) = caplog.records
    assert "the kernel does not measure them" in record.message


def test_a_peak_is_of_what_came_after_its_reset() -> None:
    """What was given back before counts no more, and what was given back since does."""
    peak = ResidentPeak()
    peak.reset()
    before_bytes = peak.num_bytes()
    np.ones(4 * NUM_BYTES, dtype=np.uint8)
    large_bytes = peak.num_bytes()
    peak.reset()

    assert large_bytes >= before_bytes + 3 * NUM_BYTES
    assert peak.num_bytes() <= large_bytes - 2 * NUM_BYTES


def test_a_peak_that_cannot_be_read_for_a_moment_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that may open no more files failed its iteration, for a statistic."""
    (tmp_path / "status").write_text("VmHWM:\t5 kB\n")
    peak = ResidentPeak(tmp_path)
    peak.reset()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(psutil, "Process", refuse)
    with caplog.at_level(logging.WARNING):
        sizes = [peak.num_bytes(), peak.num_bytes()]
        peak.reset()

    assert min(sizes) > NUM_BYTES // 2  # Of a process with numpy in it.
    (record,) = caplog.records
    assert "the kernel does not measure them" in record.message
