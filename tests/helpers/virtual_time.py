"""A clock that a module under test reads in place of the module `time`."""


class VirtualTime:
    """Time that passes while somebody sleeps, at once, and at no other moment.

    Attributes:
        now_s: seconds that were slept.
    """

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
