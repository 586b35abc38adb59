"""A job in virtual time that trains, saves and pauses: what the compared systems have in common.

Iterations in a row are booked together, and so are the saves between them. A save keeps training
waiting, and counts once it is complete.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import floor

from planaria.observe.ledger import Category
from planaria.systems.account import Account
from planaria.systems.system import Setting


class VirtualJob:
    """A job that begins at time 0 with a pause or without a plan.

    Args:
        batch: samples of an iteration.
        save_every: number of iterations from one save to the next; 0: none is made.

    Attributes:
        account: seconds and samples so far.
        saved: number of iterations in the newest complete save.
    """

    def __init__(self, batch: int, *, save_every: int) -> None:
        self.account = Account(batch)
        self.saved = 0
        self._save_every = save_every
        self._iteration_s = 0.0
        self._save_s = 0.0
        self._idle = 0.0
        self._slowness = 1.0
        self._pauses: deque[tuple[Category, float, Callable[[], None] | None]] = deque()
        self._at_commit: Callable[[], None] | None = None

    @property
    def is_pausing(self) -> bool:
        """Whether nobody trains now."""
        return bool(self._pauses) or not self._iteration_s

    def train_by(self, iteration_s: float, *, save_s: float, idle: float = 0.0) -> None:
        """Sets the plan by which the job trains after its pauses.

        Args:
            iteration_s: seconds of an iteration; 0: there is no plan, so the job is idle.
            save_s: seconds for which a save keeps training waiting.
            idle: share of the nodes that have no work.
        """
        self._iteration_s, self._save_s, self._idle = iteration_s, save_s, idle

    def slow_down(self, slowness: float) -> None:
        """Sets the factor on the seconds of iterations, from the next one on."""
        self._slowness = slowness

    def pause(
        self, category: Category, seconds: float, then: Callable[[], None] | None = None
    ) -> None:
        """Adds a pause after those that there are; `then` is called at its end."""
        self._pauses.append((category, seconds, then))

    def save_now(self) -> None:
        """Adds a save of the present state, for which training waits."""
        iteration = self.account.num_iterations
        self.pause(Category.CHECKPOINT_STALL, self._save_s, lambda: self._on_save(iteration))

    def interrupt(self) -> None:
        """Ends all pauses and the iteration in flight, which is lost; it ends at the time until
        which the job has gone on."""
        self._pauses.clear()
        self._at_commit = None

    def go_back(self) -> None:
        """Undoes all iterations since the newest save."""
        self.account.go_back(self.saved)

    def at_commit(self, act: Callable[[], None]) -> None:
        """Calls something after the iteration in flight."""
        self._at_commit = act

    def run_until(self, now_s: float) -> None:
        """Goes on until a time; an iteration in flight is booked once it is committed."""
        while self._has_advanced(now_s):
            pass

    def _has_advanced(self, now_s: float) -> bool:
        account = self.account
        if self._pauses:
            category, seconds, then = self._pauses[0]
            left_s = now_s - account.now_s
            if seconds > left_s:
                account.spend(category, now_s)
                self._pauses[0] = (category, seconds - left_s, then)
                return False
            account.spend(category, account.now_s + seconds)
            self._pauses.popleft()
            if then is not None:
                then()
            return True
        if not self._iteration_s:
            account.spend(Category.IDLE, now_s)
            return False
        return self._has_trained(now_s)

    def _has_trained(self, now_s: float) -> bool:
        account, every = self.account, self._save_every
        iteration_s = self._iteration_s * self._slowness
        since_save = account.num_iterations - self.saved
        if self._at_commit is None and every and not since_save:
            cycle_s = every * iteration_s + self._save_s
            number = floor((now_s - account.now_s) / cycle_s)
            if number:
                self._book(number * every, number * cycle_s, stall=self._save_s / cycle_s)
                self._on_save(account.num_iterations)
                return True
        number = floor((now_s - account.now_s) / iteration_s)
        if every:
            number = min(number, max(1, every - since_save))
        if self._at_commit is not None:
            number = min(number, 1)
        if number <= 0:
            return False
        self._book(number, number * iteration_s, stall=0.0)
        act, self._at_commit = self._at_commit, None
        if every and since_save + number >= every:
            self.save_now()
        if act is not None:
            act()
        return True

    def _book(self, number: int, seconds: float, *, stall: float) -> None:
        shares = {
            Category.USEFUL: (1.0 - stall) * (1.0 - self._idle),
            Category.IDLE: (1.0 - stall) * self._idle,
            Category.CHECKPOINT_STALL: stall,
        }
        self.account.train(number, self.account.now_s + seconds, shares)

    def _on_save(self, iteration: int) -> None:
        self.saved = iteration
        self.account.settle(iteration)

    def lose_in_flight(self, now_s: float) -> None:
        """Books what an interrupted iteration took until now as time that is spent again."""
        self.account.spend(Category.REDO, now_s)


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


class VirtualRun:
    """What runs of jobs of this kind have in common; the rest of `SystemRun` is each system's.

    Args:
        save_every: number of iterations from one save to the next; 0: none is made.
    """

    def __init__(self, setting: Setting, *, save_every: int) -> None:
        self._setting = setting
        self._job = VirtualJob(setting.job.training.global_batch_size, save_every=save_every)
        self._machines = LiveMachines(setting.num_nodes)
        self._job.pause(Category.STARTUP, setting.costs.startup_s)

    @property
    def account(self) -> Account:
        """See `SystemRun`."""
        return self._job.account

    def run_until(self, now_s: float) -> None:
        """See `SystemRun`."""
        self._job.run_until(now_s)

    def set_speeds(self, speeds: Mapping[int, float], now_s: float) -> None:
        """See `SystemRun`."""
        self.run_until(now_s)
        self._machines.set_speeds(speeds)
        self._job.slow_down(self._machines.slowness)

    def _remove(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Notes a loss, which costs the iteration in flight and ends all pauses."""
        self.run_until(now_s)
        self.account.num_failures += 1
        self._machines.remove(nodes)
        self._job.lose_in_flight(now_s)
        self._job.interrupt()

    def _add(self, nodes: tuple[int, ...], now_s: float) -> None:
        """Notes that nodes are there again."""
        self.run_until(now_s)
        self._machines.add(nodes)
