"""The journaled store beside a model of dicts, through crashes at any byte and recoveries."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planaria.errors import ConflictError, LeaseLostError
from planaria.nodes.head.journal import open_store
from planaria.store.embedded import EmbeddedStore
from planaria.store.store import ABSENT, NO_LEASE, Entry, Event, Gone, Guard, Superseded

Result = TypeVar("Result")
KEYS = ("node/1", "node/10", "node/2", "leader", "commit")
PREFIXES = ("", "node/", "node/1", "leader")
REWRITE_BYTES = 700


@dataclass
class Model:
    """What the store should hold: written down as simply as can be."""

    entries: dict[str, Entry] = field(default_factory=dict)
    leases: dict[int, tuple[float, float]] = field(default_factory=dict)
    num_leases: int = 0
    events: list[Event] = field(default_factory=list)

    @property
    def revision(self) -> int:
        return len(self.events)

    def revision_of(self, key: str) -> int:
        return self.entries[key].revision if key in self.entries else ABSENT

    def put(self, key: str, value: bytes, lease: int) -> None:
        self.entries[key] = Entry(key, value, self.revision + 1, lease)
        self.events.append(self.entries[key])

    def supersede(self, keys: list[str]) -> None:
        for key in keys:
            if self.entries.pop(key, None) is not None:
                self.events.append(Superseded(key, self.revision + 1))

    def end(self, leases: list[int]) -> None:
        for lease in leases:
            del self.leases[lease]
        for key, entry in sorted(self.entries.items(), key=lambda item: item[1].revision):
            if entry.lease in leases:
                del self.entries[key]
                self.events.append(Gone(key, self.revision + 1))


@dataclass
class Watch:
    """A watch and what it has seen."""

    prefix: str
    first_revision: int
    seen: list[Event] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def expected(self, model: Model) -> list[Event]:
        events = model.events[self.first_revision - 1 :]
        return [event for event in events if event.key.startswith(self.prefix)]

    async def follow(self, store: EmbeddedStore) -> None:
        """From behind what it saw last: a watcher that comes back misses and repeats nothing."""
        first = self.seen[-1].revision + 1 if self.seen else self.first_revision
        async for event in store.watch(self.prefix, first_revision=first):
            self.seen.append(event)


class StoreMachine(RuleBasedStateMachine):
    """Operations, time, crashes; the model is asked before, the store compared after each."""

    num_crashes = 0

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.home = Path(tempfile.mkdtemp())
        self.num_starts = 0
        self.now_s = 100.0
        self.model = self.before = Model()
        self.watches: list[Watch] = []
        self.exits = AsyncExitStack()

    @initialize()
    def start(self) -> None:
        """A process opens the journal in the directory of its number."""
        opened = open_store(
            self.home / str(self.num_starts),
            now_s=lambda: self.now_s,
            rewrite_bytes=REWRITE_BYTES,
        )
        self.store = self.run(self.exits.enter_async_context(opened))
        self.last_record_starts = self.journal.stat().st_size
        for watch in self.watches:
            watch.task = self.loop.create_task(watch.follow(self.store))

    @property
    def journal(self) -> Path:
        return self.home / str(self.num_starts) / "journal"

    def run(self, awaitable: Awaitable[Result]) -> Result:
        async def bounded() -> Result:
            async with asyncio.timeout(20.0):
                return await awaitable

        return self.loop.run_until_complete(bounded())

    def change(self, operation: Awaitable[Any], model_operation: Callable[[Model], None]) -> Any:
        """Does it to both; remembers what a crash inside the write would leave."""
        file, before = self.journal.stat(), deepcopy(self.model)
        result = self.run(operation)
        model_operation(self.model)
        after = self.journal.stat()
        if (after.st_ino, after.st_size) != (file.st_ino, file.st_size):
            # A journal that was rewritten cannot be cut back: its rename is one step.
            is_rewritten = after.st_ino != file.st_ino
            self.last_record_starts = after.st_size if is_rewritten else file.st_size
            self.before = before
        return result

    @rule(
        key=st.sampled_from(KEYS),
        value=st.binary(max_size=20),
        lease=st.integers(0, 4),
        guard=st.none() | st.tuples(st.sampled_from(KEYS), st.integers(-1, 1)),
    )
    def put(self, key: str, value: bytes, lease: int, guard: tuple[str, int] | None) -> None:
        """Guards are mostly right, or one off; leases mostly live, or over, or never were."""
        guards = []
        if guard is not None:
            guards = [Guard(guard[0], max(0, self.model.revision_of(guard[0]) + guard[1]))]
        operation = self.store.put(key, value, guards=guards, lease=lease)
        if any(self.model.revision_of(g.key) != g.revision for g in guards):
            with pytest.raises(ConflictError):
                self.run(operation)
        elif lease != NO_LEASE and lease not in self.model.leases:
            with pytest.raises(LeaseLostError):
                self.run(operation)
        else:
            revision = self.change(operation, lambda model: model.put(key, value, lease))
            assert self.model.revision == revision

    @rule(key=st.sampled_from(KEYS), old=st.lists(st.sampled_from(KEYS), max_size=2, unique=True))
    def put_in_place(self, key: str, old: list[str]) -> None:
        """A write that supersedes others."""
        old = [other for other in old if other != key]

        def done(model: Model) -> None:
            model.put(key, b"new", NO_LEASE)
            model.supersede(old)

        self.change(self.store.put(key, b"new", supersedes=old), done)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), max_size=3, unique=True),
        ttl_s=st.sampled_from((0.5, 3.0, 20.0)),
    )
    def grant_each(self, keys: list[str], ttl_s: float) -> None:
        def granted(model: Model) -> None:
            old = [model.entries[key].lease for key in keys if key in model.entries]
            for key in keys:
                model.num_leases += 1
                model.leases[model.num_leases] = (ttl_s, self.now_s + ttl_s)
                model.put(key, b"", model.num_leases)
            model.end(sorted(set(old) & set(model.leases)))

        leases = self.change(self.store.grant_each(keys, ttl_s), granted)
        assert [self.model.num_leases - len(keys) + 1 + n for n in range(len(keys))] == [*leases]

    @rule(lease=st.integers(1, 5))
    def keep_alive(self, lease: int) -> None:
        if lease in self.model.leases:
            self.run(self.store.keep_alive(lease))
            ttl_s, _ = self.model.leases[lease]
            # It is not in the journal, so a crash inside an older write does not undo it either;
            # after a restart the lease has its whole time anyway.
            self.model.leases[lease] = (ttl_s, self.now_s + ttl_s)
        else:
            with pytest.raises(LeaseLostError):
                self.run(self.store.keep_alive(lease))

    @rule(lease=st.integers(1, 5))
    def revoke(self, lease: int) -> None:
        ended = [lease] if lease in self.model.leases else []
        self.change(self.store.revoke(lease), lambda model: model.end(ended))

    @rule(passed_s=st.sampled_from((0.1, 0.5, 2.9, 3.0, 30.0)))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        due = [lease for lease, (_, due_s) in self.model.leases.items() if due_s <= self.now_s]
        self.change(self.store.expire(), lambda model: model.end(due))

    @precondition(lambda self: len(self.watches) < 4)
    @rule(prefix=st.sampled_from(PREFIXES), back=st.integers(0, 9))
    def watch(self, prefix: str, back: int) -> None:
        watch = Watch(prefix, max(1, self.model.revision + 2 - back))
        watch.task = self.loop.create_task(watch.follow(self.store))
        self.watches.append(watch)

    @rule(torn=st.floats(0.0, 1.0, exclude_max=True), is_acknowledged=st.booleans())
    def crash(self, torn: float, *, is_acknowledged: bool) -> None:
        """The next process finds the journal whole, or cut inside a write not yet acknowledged.

        A watcher has seen the last write here, so only one that nobody has seen may be cut:
        what watches saw of it is forgotten, as if the crash had come before they were told.
        """
        StoreMachine.num_crashes += 1
        content = self.journal.read_bytes()
        if not is_acknowledged and self.last_record_starts < len(content):
            rest = len(content) - self.last_record_starts
            content = content[: self.last_record_starts + int(rest * torn)]
            self.model = deepcopy(self.before)
            for watch in self.watches:
                watch.seen = [e for e in watch.seen if e.revision <= self.model.revision]
        self.stop()
        self.num_starts += 1
        self.journal.parent.mkdir()
        self.journal.write_bytes(content)
        self.now_s -= 50.0  # Another clock: it may also be behind.
        self.model.leases = {
            lease: (ttl_s, self.now_s + ttl_s) for lease, (ttl_s, _) in self.model.leases.items()
        }
        self.before = deepcopy(self.model)
        self.start()

    @invariant()
    def is_as_the_model_says(self) -> None:
        for prefix in PREFIXES:
            entries = [e for e in self.model.entries.values() if e.key.startswith(prefix)]
            found, revision = self.run(self.store.range(prefix))
            assert self.model.revision == revision
            assert sorted(entries, key=lambda entry: entry.revision) == list(found)
        for key in KEYS:
            assert self.model.entries.get(key) == self.run(self.store.get(key))
        for watch in self.watches:
            self.run(self.caught_up(watch))
            assert watch.expected(self.model) == watch.seen

    async def caught_up(self, watch: Watch) -> None:
        """Returns once the watch has seen all that it should, and has had time for more."""
        num = len(watch.expected(self.model))
        while len(watch.seen) < num and watch.task is not None and not watch.task.done():
            await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)

    def stop(self) -> None:
        """Ends this start's tasks and files; what the journal holds is not changed by it."""

        async def end() -> None:
            tasks = [watch.task for watch in self.watches if watch.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.exits.aclose()

        self.run(end())
        self.exits = AsyncExitStack()

    def teardown(self) -> None:
        """Each run ends in a crash: Hypothesis may draw none in all of them."""
        self.crash(self.model.revision % 7 / 7, is_acknowledged=self.model.revision % 2 == 0)
        self.is_as_the_model_says()
        self.stop()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.home)


def test_the_store_is_what_the_model_says_through_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, results, refusals and watches, after each of 40 steps of 40 runs."""
    for call in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, call, lambda _fd: None)  # Crashes are of the process alone here.

    StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
    StoreMachine.TestCase("runTest").runTest()

    assert StoreMachine.num_crashes >= 40  # Some 100; Hypothesis draws anew each time.
