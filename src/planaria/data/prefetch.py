"""Microbatches that other processes load ahead of the rank that uses them.

They are processes, not threads: a sample of the user's may draw random numbers, and the generators
of torch, numpy and Python are those of the whole process. They are forked from the rank before it
has threads or a device, read the data set for themselves, and load microbatches of the next
iteration while the rank computes this one. A microbatch is a function of the seed, the iteration
and its number, so its bits do not depend on who loads it.

A loader is handed a few microbatches at a time, and the next one when it has answered. So the rank
never waits to ask, and what it needs no more after a change of the plan is not loaded.

What cannot be had from them the rank loads itself: after a change of the plan, if one of them ends,
or if it could not load something; then the user's error is raised where it always was.
"""

import ctypes
import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from planaria.core.plan import Plan
from planaria.core.specs import NodeSpec
from planaria.data.batches import COUNT, Batches, check_num_samples
from planaria.data.datasets import Dataset, load_dataset

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG: Final = 1
# Number of microbatches that a loader is handed at a time: it loads one, and has the next one. Some
# 270 fill the buffer of its socket, and the rank would have to wait.
_NUM_HANDED: Final = 2
Key = tuple[int, int]  # (iteration, microbatch)


@dataclass(frozen=True, slots=True)
class LoaderStart:
    """The first message to a loader: what it loads samples of.

    A loader that sees another number of samples than the job began with ends.
    """

    spec: NodeSpec
    objective: str


def fork_loaders(count: int, *, close: Collection[int]) -> list[Connection]:
    """Forks processes that load microbatches; returns the connections to them.

    The caller must have no thread beside its own.

    Args:
        close: descriptors of the caller that a loader must not keep open.
    """
    loaders: list[Connection] = []
    parent = os.getpid()
    for _ in range(count):
        own, other = Pipe()
        if os.fork():
            other.close()
            loaders.append(own)
            continue
        try:
            for connection in (own, *loaders):
                connection.close()
            for descriptor in close:
                os.close(descriptor)
            _serve(other, parent)
        finally:
            os._exit(0)
    return loaders


def _serve(rank: Connection, parent: int) -> None:
    """Loads what the rank asks for, until the rank ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    try:
        start: LoaderStart = rank.recv()
        job = start.spec.job
        dataset = load_dataset(
            job.data,
            objective=start.objective,
            seed=job.training.seed,
            cache_directory=Path(start.spec.cache_directory),
            model=job.model,
        )
        check_num_samples(len(dataset), start.spec.num_samples.data, "data")
        batches: Batches | None = None
        while True:
            iteration, index = rank.recv()
            if batches is None or batches.iteration != iteration:
                batches = Batches(dataset, job.training, iteration=iteration)
            try:
                content: Any = batches.num_targets() if index == COUNT else batches.load(index)
            except Exception as error:
                logger.info("microbatch %s of iteration %s: %r", index, iteration, error)
                content = None  # The rank will find the same error, and tell it.
            rank.send_bytes(pickle.dumps(((iteration, index), tree_map(_as_array, content)), 5))
    except (EOFError, OSError):
        return


def _as_array(value: object) -> object:
    """Tensors as arrays, which are sent without a copy of their own; bfloat16 has no array."""
    has_array = isinstance(value, Tensor) and value.dtype != torch.bfloat16
    return value.numpy() if has_array else value  # type: ignore[attr-defined]


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if hasattr(value, "__array_interface__") else value


class Prefetch:
    """What loaders have loaded for a rank, and what they were asked for.

    Args:
        loaders: connections to them, of `fork_loaders`; may be empty.
    """

    def __init__(self, loaders: Sequence[Connection], start: LoaderStart) -> None:
        self._training = start.spec.job.training
        self._loaders = list(loaders)
        self._asked: dict[Key, int] = {}  # The loader that was asked, by its number.
        self._waiting: list[deque[Key]] = [deque() for _ in loaders]  # To be handed, by loader.
        self._num_handed = [0 for _ in loaders]  # Number of keys not yet answered, by loader.
        self._loaded: dict[Key, Any] = {}
        self._ended: set[int] = set()
        self._changed = threading.Condition()
        for number, loader in enumerate(self._loaders):
            loader.send(start)
            receive = threading.Thread(
                target=self._receive, args=(number,), name="prefetch", daemon=True
            )
            receive.start()

    def batches(self, dataset: Dataset, iteration: int, plan: Plan, rank: int) -> Batches:
        """The microbatches of an iteration, of which those that the rank needs are loaded ahead."""
        if not self._loaders:
            return Batches(dataset, self._training, iteration=iteration)
        self.ask(iteration, needed_microbatches(plan, rank))
        return Batches(dataset, self._training, iteration=iteration, ahead=self)

    def ask(self, iteration: int, indices: Iterable[int]) -> None:
        """Asks for microbatches of an iteration and of the next one; forgets those before."""
        # In the order in which the rank needs them.
        keys = dict.fromkeys((n, index) for n in (iteration, iteration + 1) for index in indices)
        with self._changed:
            for old in [key for key in self._asked if key not in keys]:
                del self._asked[old]
                self._loaded.pop(old, None)
            waiting = set(chain.from_iterable(self._waiting))
            for queue in self._waiting:
                queue.clear()
            for key in keys:
                is_new = key not in self._asked
                number = self._asked.setdefault(key, (key[1] + 1) % len(self._loaders))
                if is_new or key in waiting:
                    self._waiting[number].append(key)
            for number in range(len(self._loaders)):
                self._hand(number)

    def _hand(self, number: int) -> None:
        """Hands a loader what it may have now; the caller holds the lock."""
        queue = self._waiting[number]
        while queue and self._num_handed[number] < _NUM_HANDED and number not in self._ended:
            try:
                self._loaders[number].send(queue.popleft())
            except OSError:
                self._note_end(number)
            self._num_handed[number] += 1

    def take(self, iteration: int, index: int) -> Any:
        """A microbatch, or the number of targets, that was asked for; None: there is none."""
        key = iteration, index
        with self._changed:
            if key not in self._asked:
                return None
            number = self._asked[key]
            self._changed.wait_for(lambda: key in self._loaded or number in self._ended)
            del self._asked[key]  # If it is needed again, it is asked for again.
            return self._loaded.pop(key, None)

    def _receive(self, number: int) -> None:
        try:
            while True:
                key, content = pickle.loads(self._loaders[number].recv_bytes())
                with self._changed:
                    self._num_handed[number] -= 1
                    self._hand(number)
                    if key in self._asked:
                        self._loaded[key] = tree_map(_as_tensor, content)
                        self._changed.notify_all()
        except Exception as error:  # Whatever it is, nobody must wait for this loader.
            logger.info("what a loader sent cannot be used: %r", error)
            self._note_end(number)
            self._loaders[number].close()  # It ends, if it lives; nothing is sent to it any more.

    def _note_end(self, number: int) -> None:
        with self._changed:
            if number not in self._ended:
                logger.warning("a process that loads samples has ended; its rank loads them itself")
            self._ended.add(number)
            self._changed.notify_all()


def needed_microbatches(plan: Plan, rank: int) -> list[int]:
    """The microbatches of which a rank needs inputs or targets, and `COUNT` if it needs these."""
    routes = list(enumerate(plan.routes))
    needed = [n for n, route in routes if rank in (route[0].rank, route[-1].rank)]
    counts = any(route[-1].rank == rank for _, route in routes)
    return [*([COUNT] if counts else []), *needed]
