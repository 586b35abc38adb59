"""Saves that take longer than the iterations between them."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from planaria.coordinator.commands import Published
from planaria.simulator.economics.virtual_saves import VirtualSaves
from planaria.systems.modelled_job import StoredSaves
from planaria.systems.system import RecoveryCosts


def newest(every: int, write_s: float, jumps: list[int], *, pace_s: float) -> int:
    """The iterations of the newest complete save after jumps over so many commits."""
    saves, committed = StoredSaves(every=every, write_s=write_s), 0
    for number in jumps:
        committed += number
        saves.on_commits(number, committed, committed * pace_s, pace_s=pace_s)
    return saves.newest


def newest_of_planaria(every: int, write_s: float, jumps: list[int], *, pace_s: float) -> int:
    """The same of a simulated job of planaria."""
    checkpoint = SimpleNamespace(persist_every=every, keep=0)
    job = SimpleNamespace(
        checkpoint=checkpoint, cluster=SimpleNamespace(nodes=1, devices_per_node=1)
    )
    rules: Any = SimpleNamespace(
        job=job, prices=SimpleNamespace(layer_bytes=(1,)), first_iteration=0, source=""
    )
    saves, committed = VirtualSaves(rules, RecoveryCosts(save_bytes_per_s=1.0)), 0
    saves.write_s = write_s
    for number in jumps:
        committed += number
        published = saves.on_commits(number, committed, committed * pace_s, iteration_s=pace_s)
        for save in published:
            assert isinstance(save, Published)
            saves.on_published(save)
    return saves.newest[0]


@pytest.mark.parametrize("newest_of", [newest, newest_of_planaria])
def test_a_save_is_begun_once_the_one_before_it_is_complete(newest_of: Any) -> None:
    """Saves of 100 s that are due each 10 s: at 910 s that of 810 s is complete. One by one each
    new save took the place of one that was not; in one jump all of them overlapped."""
    for jumps in ([1000], [1] * 1000, [500, 500]):
        assert newest_of(10, 100.0, jumps, pace_s=1.0) == 810


@pytest.mark.parametrize("newest_of", [newest, newest_of_planaria])
def test_saves_do_not_depend_on_the_length_of_jumps(newest_of: Any) -> None:
    """With random saves and paces; real jobs commit one by one."""
    for seed in range(200):
        rng = Random(seed)
        every, pace_s = rng.randint(1, 20), rng.uniform(0.1, 10.0)
        write_s = rng.choice((0.0, rng.uniform(0.0, 40.0) * pace_s))
        jumps = [rng.randint(1, 60) for _ in range(rng.randint(1, 8))]
        by_ones = newest_of(every, write_s, [1] * sum(jumps), pace_s=pace_s)

        assert newest_of(every, write_s, [sum(jumps)], pace_s=pace_s) == by_ones, seed
        assert newest_of(every, write_s, jumps, pace_s=pace_s) == by_ones, seed
        if write_s <= every * pace_s:
            done = (sum(jumps) - write_s / pace_s) // every * every
            assert by_ones == max(0, done), seed
