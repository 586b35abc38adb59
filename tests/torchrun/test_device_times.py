"""Spans of a device by the host's clock, which the host learns from when it wakes."""

import time
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.linked_ranks import wait_until
from planaria.torchrun.device_times import DeviceTimes

AHEAD_S = 100.0  # Of the host's clock.


@dataclass(frozen=True, slots=True)
class DeviceMoment:
    seconds: float

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: "DeviceMoment") -> float:
        return self.seconds - earlier.seconds


class Passed:
    """The host is told without delay."""

    def wait(self) -> None:
        pass


class Clocked:
    """A device that has passed what it was given at moments which the test says."""

    def __init__(self, moments: list[float]) -> None:
        self._moments = iter(moments)

    def moment(self) -> DeviceMoment:
        return DeviceMoment(next(self._moments))

    def mark(self) -> Passed:
        return Passed()


def spans_of(
    moments: list[float], wakes: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[float, float]]:
    """The spans that are told of moments of begin and end, where the host wakes at other ones."""
    spans: list[tuple[float, float]] = []
    device: Any = Clocked([0.0, *moments])
    times = DeviceTimes(device, lambda *span: spans.append(span))
    woken = iter(wakes)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: next(woken))
        for _ in wakes:
            times.end(times.start())
        times.close()
        times._thread.join()
    wait_until(lambda: len(spans) == len(wakes))
    return spans


def test_spans_are_as_early_as_the_host_has_ever_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = spans_of([1.0, 2.0, 3.0, 4.0], [AHEAD_S + 2.0, AHEAD_S + 4.5], monkeypatch)

    assert spans == [(AHEAD_S + 1.0, AHEAD_S + 2.0), (AHEAD_S + 3.0, AHEAD_S + 4.0)]


def test_spans_stay_in_order_where_the_host_has_woken_late_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one was told too late, and cannot be taken back."""
    spans = spans_of([1.0, 2.0, 2.1, 3.0], [AHEAD_S + 2.5, AHEAD_S + 3.0], monkeypatch)

    assert spans == [(AHEAD_S + 1.5, AHEAD_S + 2.5), (AHEAD_S + 2.5, AHEAD_S + 3.0)]
