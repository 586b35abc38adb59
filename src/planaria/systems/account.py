"""The account of a simulated job: what each second was spent on, and which samples count.

The seconds are in the ledger of a real run (observe/ledger.py), so an instant has one category. An
iteration counts once it is committed. If the job goes back to an older state, the iterations since
then count no more, and their seconds become `redo`.

Iterations between two events are all alike, so they are booked together, as a number of iterations
and the seconds of one of them by category. Only runs of iterations that may still be undone are
kept. So the account does not grow with the length of the job.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from planaria.observe.ledger import Category, Ledger
from planaria.observe.recoveries import SourceTier

POINTS_MAX: Final = 2048  # Number of points of a curve; a screen shows no more.


@dataclass(slots=True)
class _Stretch:
    """Iterations in a row that are alike.

    Attributes:
        seconds: seconds of one iteration by category.
    """

    num_iterations: int
    seconds: dict[Category, float]


class Account:
    """The seconds and samples of one job, which begins at time 0.

    Args:
        batch: samples of an iteration.

    Attributes:
        ledger: seconds so far by category, and recoveries by tier.
        num_iterations: number of committed iterations that count.
        num_redone: number of iterations that were committed and then undone.
        num_failures: number of times that nodes were lost.
        num_restarts: number of times that the job ended and was started again.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.ledger = Ledger(0.0, 0.0)
        self.num_iterations = 0
        self.num_redone = 0
        self.num_failures = 0
        self.num_restarts = 0
        self._stretches: deque[_Stretch] = deque()
        self._part: dict[Category, float] = {}  # Seconds of an iteration that goes on later.
        self._num_settled = 0
        self._points: list[tuple[float, int]] = [(0.0, 0)]
        self._gap_s = 0.0

    @property
    def now_s(self) -> float:
        """The time until which all seconds are booked."""
        return self.ledger.now_s

    @property
    def samples(self) -> int:
        """The number of samples that count."""
        return self.batch * self.num_iterations

    def spend(self, category: Category, until_s: float) -> None:
        """Books the time until `until_s` in a category."""
        if until_s > self.now_s:
            self.ledger = self.ledger.spend(category, until_s)

    def train_part(self, until_s: float, shares: Mapping[Category, float]) -> None:
        """Books a part of an iteration that goes on later; `train` or `lose_part` says what it came
        to.

        Args:
            shares: share of the time by category; the shares add up to 1.
        """
        for category, seconds in self._spend_shares(until_s, shares).items():
            self._part[category] = self._part.get(category, 0.0) + seconds

    @property
    def has_part(self) -> bool:
        """Whether a part of an iteration is booked that does not count yet."""
        return bool(self._part)

    def lose_part(self) -> None:
        """Says that parts of an iteration that does not count yet are done again."""
        for category, seconds in self._part.items():
            self.ledger = self.ledger.move(seconds, category, Category.REDO)
        self._part = {}

    def train(self, num_iterations: int, until_s: float, shares: Mapping[Category, float]) -> None:
        """Books iterations that are committed by `until_s`.

        Args:
            num_iterations: number of iterations, which are alike; 1 if parts of it are booked.
            shares: share of the time by category; the shares add up to 1.
        """
        assert num_iterations == 1 or (num_iterations > 1 and not self._part)
        spent = self._spend_shares(until_s, shares)
        part, self._part = self._part, {}
        self.num_iterations += num_iterations
        seconds = {
            category: spent.get(category, 0.0) / num_iterations + part.get(category, 0.0)
            for category in spent | part
        }
        if self._stretches and self._stretches[-1].seconds == seconds:
            self._stretches[-1].num_iterations += num_iterations
        else:
            self._stretches.append(_Stretch(num_iterations, seconds))
        self._add_point()

    def _spend_shares(
        self, until_s: float, shares: Mapping[Category, float]
    ) -> dict[Category, float]:
        """Books the time until `until_s` by shares; returns the seconds of each category."""
        took_s = max(0.0, until_s - self.now_s)
        self.spend(Category.USEFUL, until_s)
        for category, share in shares.items():
            if category is not Category.USEFUL and share:
                self.ledger = self.ledger.move(took_s * share, Category.USEFUL, category)
        return {category: share * took_s for category, share in shares.items()}

    def go_back(self, to_iteration: int) -> None:
        """Undoes committed iterations, so that only the first `to_iteration` ones count."""
        num_undone = self.num_iterations - to_iteration
        assert 0 <= num_undone <= self.num_iterations - self._num_settled, to_iteration
        self.num_iterations = to_iteration
        self.num_redone += num_undone
        while num_undone:
            stretch = self._stretches[-1]
            number = min(num_undone, stretch.num_iterations)
            for category, seconds in stretch.seconds.items():
                if category is not Category.REDO:
                    self.ledger = self.ledger.move(number * seconds, category, Category.REDO)
            stretch.num_iterations -= number
            num_undone -= number
            if not stretch.num_iterations:
                self._stretches.pop()
        self._add_point()

    def stop(self, now_s: float) -> None:
        """Says that training stops; the iteration in flight is lost, and a recovery begins."""
        self.close_recovery()
        self.spend(Category.REDO, now_s)
        self.recover(SourceTier.LIVE)

    def start_again(self, saved: int) -> None:
        """Says that a job that had ended is started again, from a save.

        Args:
            saved: number of iterations that the save is of; 0: the job begins from its start.
        """
        self.num_restarts += 1
        self.recover(SourceTier.DISK if saved else SourceTier.START)
        self.go_back(saved)

    def recover(self, tier: SourceTier) -> None:
        """Says that training, which has stopped, goes on with a state that this tier keeps."""
        self.ledger = self.ledger.recover(tier)

    def close_recovery(self) -> None:
        """Says that training has gone on since the last recovery."""
        self.ledger = self.ledger.close_recovery()

    def settle(self, iteration: int) -> None:
        """Says that the first `iteration` iterations are never undone, because they are saved."""
        assert iteration <= self.num_iterations
        while self._stretches and self._num_settled < iteration:
            number = min(iteration - self._num_settled, self._stretches[0].num_iterations)
            self._num_settled += number
            self._stretches[0].num_iterations -= number
            if not self._stretches[0].num_iterations:
                self._stretches.popleft()

    @property
    def curve(self) -> tuple[tuple[float, int], ...]:
        """The samples that count, as points (time, samples) in order of time."""
        return (*self._points, (self.now_s, self.samples))

    def _add_point(self) -> None:
        """Adds a point to the curve, unless the last one is too near; thins out a full curve."""
        if self.now_s - self._points[-1][0] < self._gap_s:
            return
        self._points.append((self.now_s, self.samples))
        if len(self._points) > POINTS_MAX:
            self._points = self._points[::2]
            self._gap_s = self.now_s / POINTS_MAX * 2
