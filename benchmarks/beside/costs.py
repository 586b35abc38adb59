"""What the engine itself takes of a processor, in microseconds: a dispatched action, and a hop.

dispatch    an action of a rank whose layers compute next to nothing and whose tensors pass
            through queues of this process; the layers' own forwards and backwards, and all that
            is done once an iteration, are taken off
hop         a message of the small GPT-2's activations over a link of two ranks on this machine,
            all threads of both ends
"""

import queue
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from beside.engine_rank import IDLE_CALLBACKS, job_of, open_links
from beside.shape import Shape
from peers.small_gpt import MICROBATCH_SIZE, SEQUENCE_LENGTH, WIDTH
from planaria.core.commit import Votes, vector_layout
from planaria.core.job import ModelConfig
from planaria.core.plan import Pipeline, PipelineTemplate, Stage, plain_plan
from planaria.data.batches import Batches
from planaria.engine.comm.device_comm import DeviceComm
from planaria.engine.iteration.executor import Executor, RankContext
from planaria.engine.iteration.lateness import ActionTimes
from planaria.engine.prepare import split_model
from planaria.engine.stage import RankStage
from planaria.schedule.lower import rank_schedule
from planaria.transport.links import Channel, Links, Tag
from planaria.transport.pulse import Pulse

DISPATCH_GOAL_US: Final = 20.0
HOP_GOAL_US: Final = 150.0
_FEW, _MANY = 16, 272  # Microbatches of the two kinds of iterations whose difference counts.
_NUM_RUNS: Final = 9
_NUM_HOPS: Final = 1000
_TIMEOUT_S: Final = 60.0


class _Null(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


def layers() -> tuple[list[object], Callable[[Tensor, Tensor], Tensor]]:
    """Two layers that compute next to nothing."""
    return [_Null, _Null], _loss_sum


def _loss_sum(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()


class _NullBatches:
    """Microbatches of one number, which need not be loaded."""

    microbatch_size = MICROBATCH_SIZE

    def __init__(self) -> None:
        self.consumed: dict[int, Any] = {}
        self._number = torch.ones(1)

    def keep(self, _: int) -> None:
        pass

    def inputs(self, _: int) -> Tensor:
        return self._number

    def targets(self, _: int) -> Tensor:
        return self._number

    def num_targets(self) -> int:
        return 1

    def name_samples(self, _: int) -> AbstractContextManager[None]:
        return nullcontext()


class _QueueComm:
    """A `DeviceComm` of ranks of this process."""

    def __init__(
        self, queues: dict[tuple[int, Tag], "queue.SimpleQueue[Tensor]"], rank: int
    ) -> None:
        self._queues = queues
        self._rank = rank

    def send(self, target: int, tag: Tag, tensor: Tensor, *, virtual_bytes: int) -> None:
        del virtual_bytes
        self._queues[target, tag].put(tensor.detach())

    def receive(self, source: int, tag: Tag) -> Tensor:
        del source
        return self._queues[self._rank, tag].get(timeout=_TIMEOUT_S)

    def check(self) -> None:
        """Nothing ends the epoch."""


def costs_us() -> tuple[float, float]:
    """Microseconds of CPU of a dispatched action and of a hop."""
    torch.set_num_threads(1)
    pair = [open_links(rank) for rank in range(2)]
    addresses = {links.rank: links.address for links in pair}
    with ThreadPoolExecutor(2) as pool:
        begun = [
            pool.submit(
                links.begin,
                0,
                addresses=addresses,
                peers={1 - links.rank},
                timeout_s=_TIMEOUT_S,
            )
            for links in pair
        ]
        for each in begun:
            each.result(timeout=_TIMEOUT_S)
        found = _dispatch_us(pair, pool), _hop_us(pair)
    for links in pair:
        links.close()
    return found


def _dispatch_us(pair: Sequence[Links], pool: ThreadPoolExecutor) -> float:
    few_s, few = _iteration_s(pair, pool, _FEW)
    many_s, many = _iteration_s(pair, pool, _MANY)
    null_s = (_MANY - _FEW) * _null_microbatch_s()
    return 1e6 * (many_s - few_s - null_s) / (many - few)


def _iteration_s(
    pair: Sequence[Links], pool: ThreadPoolExecutor, num_microbatches: int
) -> tuple[float, int]:
    """CPU seconds of both ranks' compute threads in an iteration, and the number of actions."""
    shape = Shape(1, 2, num_microbatches)
    config = job_of(shape, is_deterministic=False)
    config = replace(
        config,
        model=ModelConfig(kind="python", target="beside.costs:layers"),
        training=replace(config.training, optimizer={"name": "SGD"}),
    )
    template = PipelineTemplate((Stage(0, 1, 1), Stage(1, 2, 1)), 2)
    plan = plain_plan(0, (Pipeline(template, (0, 1)),), (num_microbatches,))
    queues: dict[tuple[int, Tag], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
    split = split_model(config.model, seed=0, vocabulary_size=0, sequence_length=0)
    executors, num_actions = [], 0
    for links in pair:
        stage = RankStage(split, training=config.training)
        stage.hold([links.rank], states={}, age=0)
        schedule = rank_schedule(plan, links.rank)
        num_actions += len(schedule.actions[links.rank])
        context = RankContext(
            stage=stage,
            links=links,
            layout=vector_layout(config, 2),
            pulse=Pulse(),
            times=ActionTimes(config),
            resilience=config.resilience,
        )
        comm = cast(DeviceComm, _QueueComm(queues, links.rank))
        executors.append(
            Executor(plan, schedule, context=context, comm=comm, callbacks=IDLE_CALLBACKS)
        )

    def run(executor: Executor, iteration: int) -> float:
        begin_s = time.thread_time()
        batches = cast(Batches, _NullBatches())
        executor.run(iteration, batches, votes=lambda: Votes(0, 0, 0, 0))
        return time.thread_time() - begin_s

    seconds = []
    for iteration in range(_NUM_RUNS):
        number = num_microbatches * _NUM_RUNS + iteration  # Of no other iteration on these links.
        running = [pool.submit(run, executor, number) for executor in executors]
        seconds.append(sum(each.result(timeout=_TIMEOUT_S) for each in running))
    for executor in executors:
        executor.close()
    return statistics.median(seconds), num_actions


def _null_microbatch_s() -> float:
    """CPU seconds of both layers' forward and backward, in a plain loop."""
    first, second = _Null(), _Null()
    number = torch.ones(1)
    begin_s = time.thread_time()
    for _ in range(_MANY):
        hidden = first(number)
        leaf = hidden.detach().requires_grad_()
        torch.autograd.backward(_loss_sum(second(leaf), number) / 1)
        torch.autograd.backward(hidden, leaf.grad)
    return (time.thread_time() - begin_s) / _MANY


def _hop_us(pair: Sequence[Links]) -> float:
    first, second = pair
    payload = np.zeros((MICROBATCH_SIZE, SEQUENCE_LENGTH, WIDTH), dtype=np.float32)
    begin_s = time.process_time()
    for index in range(_NUM_HOPS):
        tag = Tag(Channel.FORWARD, 0, index)
        first.send(second.rank, tag, payload)
        second.receive(first.rank, tag, timeout_s=_TIMEOUT_S)
    return 1e6 * (time.process_time() - begin_s) / _NUM_HOPS
