"""A simulated disk that takes nothing any more, or that hangs."""

from random import Random

from planaria.errors import StoreError
from planaria.simulator.loop import Loop, Process
from planaria.simulator.modelled.store import DiskModel, SimulatedDisk
from planaria.store.store import Event


class _Owner:
    """Who has the disk open, and what it heard, in order."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.heard: list[str] = []
        self.disk = SimulatedDisk(self.loop, Random(0), self._written, model=DiskModel())
        self.process = Process(self.loop, "owner", place=-1, on_error=self._failed)
        self.store = self.disk.open(
            self.process, self._refused, lease_now_s=lambda: self.process.now_s
        )

    def put(self, key: str) -> None:
        self.process.spawn(self._put(key))

    async def _put(self, key: str) -> None:
        await self.store.put(key, b"")
        self.heard.append(f"{key} is kept")

    def _written(self, event: Event) -> None:
        self.heard.append(f"{event.key} is written")

    def _refused(self, error: StoreError) -> None:
        self.heard.append(str(error))

    def _failed(self, error: BaseException) -> None:
        raise error

    def run(self, until_s: float) -> None:
        self.loop.run(until_s=until_s, is_over=lambda: False)


def test_who_has_a_full_disk_open_knows_before_it_goes_on_in_memory() -> None:
    """As the journal's flusher does it."""
    owner = _Owner()
    owner.disk.fill()
    owner.put("a/b/c")
    owner.run(1.0)
    owner.put("a/b/d")
    owner.run(2.0)

    assert owner.heard[0] == "the disk is full"
    assert [text for text in owner.heard if "kept" in text] == ["a/b/c is kept", "a/b/d is kept"]


def test_a_process_that_is_killed_on_a_full_disk_leaves_nothing_there() -> None:
    """Whatever it would have written."""
    owner = _Owner()
    owner.disk.fill()
    owner.put("a/b/c")
    owner.process.kill()
    owner.disk.crash()
    owner.run(1.0)

    assert owner.heard == []
    assert not owner.disk.durable.entries


def test_a_disk_that_hangs_writes_once_it_goes_on() -> None:
    """Nothing is lost meanwhile."""
    owner = _Owner()
    owner.disk.hang(2.0)
    owner.put("a/b/c")
    owner.run(1.9)
    before = list(owner.heard)
    owner.run(2.1)

    assert before == []
    assert owner.heard == ["a/b/c is written", "a/b/c is kept"]


def test_leases_go_by_the_clock_of_the_process_that_is_left() -> None:
    """It stood still while another one began, whose clock was ahead, and that one was killed."""
    owner = _Owner()

    async def grant() -> None:
        await owner.store.grant_each(["a/b/c"], 3.0)

    owner.process.spawn(grant())
    owner.run(1.0)
    other = Process(owner.loop, "other", place=-2, on_error=owner._failed)
    owner.disk.open(other, owner._refused, lease_now_s=lambda: 1000.0)
    other.kill()
    owner.disk.crash()

    due_s = owner.process.now_s + 3.0
    assert owner.store.next_deadline_s == due_s
    owner.process.spawn(owner.store.expire())
    owner.run(2.0)
    assert owner.store.next_deadline_s == due_s
