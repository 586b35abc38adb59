"""The machines of a simulated job of a compared system: which are there, and how slow they are."""

from collections.abc import Iterable, Mapping


class LiveMachines:
    """The machines that are there.

    Attributes:
        there: machines, ascending.
    """

    def __init__(self, number: int) -> None:
        self.there = tuple(range(number))
        self._speeds: dict[int, float] = {}

    def remove(self, machines: Iterable[int]) -> None:
        """Notes that machines are gone."""
        gone = set(machines)
        self.there = tuple(machine for machine in self.there if machine not in gone)
        self._speeds = {m: speed for m, speed in self._speeds.items() if m not in gone}

    def add(self, machines: Iterable[int]) -> None:
        """Notes that machines are there again, at full speed."""
        self.there = tuple(sorted({*self.there, *machines}))

    def set_speeds(self, speeds: Mapping[int, float]) -> None:
        """Notes the speeds of machines."""
        self._speeds |= speeds

    @property
    def slowness(self) -> float:
        """The factor by which the slowest machine slows a job in which all wait for all."""
        return 1.0 / min(self._speeds.values(), default=1.0)
