"""A module that stands for ray: its calls are made when their results are asked for."""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest

NO_RANK: Final = 1000  # Of a call that is no run; all of these end before the runs do.


class RayFailed(Exception):
    """When Ray cannot say what a call returned, as where memory ran out."""


class ActorLost(RayFailed):
    """When the machine of an actor is lost."""


class FakeRef:
    """A call of an actor's method, made when its result is first asked for."""

    def __init__(
        self, call: Callable[[], Any], rank: int, can_end: Callable[[], bool] = lambda: True
    ) -> None:
        self._call = call
        self._result: Future[Any] = Future()
        self.rank = rank
        self.can_end = can_end
        self.has_ended = False

    def get(self) -> Any:
        """The result, or the error, which is the same each time."""
        if not self._result.done():
            try:
                self._result.set_result(self._call())
            except RayFailed as error:
                self._result.set_exception(error)
        return self._result.result()


class FakeNodes:
    """The machines of a Ray, which starts an actor on the one that has the fewest.

    Attributes:
        current: the machine on which a method is called; "here" outside of actors.
        killed: actors that the program has killed.
    """

    def __init__(self, num_nodes: int, num_actors_max: int) -> None:
        self._num_actors_max = num_actors_max
        self._num_actors = {f"node-{number}": 0 for number in range(num_nodes)}
        self.current = "here"
        self.killed: list[FakeActor] = []

    def group(
        self,
        bundles: list[dict[str, int]],
        strategy: str = "PACK",
        bundle_label_selector: Sequence[dict[str, str]] = (),
    ) -> "FakeGroup":
        """A placement group; an actor for which there is no room is on machine ""."""
        node_ids: list[str] = []
        excluded = re.findall(r"node-\d+", str(bundle_label_selector))
        for _ in bundles:
            free = [
                node
                for node, number in self._num_actors.items()
                if node not in {*excluded, *node_ids} and number < self._num_actors_max
            ]
            node_ids.append(min(free, key=lambda node: self._num_actors[node], default=""))
            if node_ids[-1]:
                self._num_actors[node_ids[-1]] += 1
        return FakeGroup(bundles, strategy, node_ids)

    def remove(self, group: "FakeGroup") -> None:
        for node in filter(None, group.node_ids):
            self._num_actors[node] -= 1


class FakeMethod:
    """A method of an actor; a run has a rank."""

    def __init__(self, actor: "FakeActor", method: Callable[..., Any]) -> None:
        self._actor = actor
        self._method = method

    def options(self, **_: str) -> "FakeMethod":
        return self

    def remote(self, *arguments: Any) -> FakeRef:
        is_run = self._method.__name__ == "run"
        return FakeRef(
            lambda: self._call(arguments),
            arguments[1] if is_run else NO_RANK,
            lambda: is_run or self._actor.group.node_ids[self._actor.index] != "",
        )

    def _call(self, arguments: Sequence[Any]) -> Any:
        nodes = self._actor.nodes
        nodes.current = self._actor.group.node_ids[self._actor.index]
        try:
            return self._method(*arguments)
        finally:
            nodes.current = "here"


class FakeActor:
    """A handle of an actor."""

    def __init__(self, cls: type, nodes: FakeNodes, group: "FakeGroup", index: int) -> None:
        self._instance = cls()
        self.nodes = nodes
        self.group = group
        self.index = index

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(self, getattr(self._instance, name))


class FakeMachine:
    """An actor whose runs end as its test says.

    Attributes:
        run_of: what a run of a rank returns; one that ends with ActorLost is made again here.
    """

    run_of: Callable[[int], int] = staticmethod(lambda _: 0)

    def place(self, _: int) -> tuple[str, str, bool]:
        return current_node(), "127.0.0.1", False

    def run(self, _: int, rank: int, __: str) -> int:
        return type(self).run_of(rank)


class FakeGroup:
    """A placement group."""

    def __init__(self, bundles: list[dict[str, int]], strategy: str, node_ids: list[str]) -> None:
        self.bundles = bundles
        self.strategy = strategy
        self.node_ids = node_ids

    def ready(self) -> FakeRef:
        return FakeRef(lambda: self, NO_RANK)


def current_node() -> str:
    """The machine on which a method of an actor is called."""
    return str(sys.modules["ray"].get_runtime_context().get_node_id())


def fake_wait(
    refs: list[FakeRef],
    *,
    head_ends_last: bool,
    num_returns: int = 1,
    timeout: float | None = None,
) -> tuple[list[FakeRef], list[FakeRef]]:
    """The calls that have ended, those of the highest ranks first, and the other ones.

    Args:
        head_ends_last: whether the head ends once nothing else is waited for, or nothing else would
            be seen to end; else all end at the same time.
    """
    assert 0 < num_returns <= len(refs)
    ended = sorted([ref for ref in refs if ref.can_end()], key=lambda ref: ref.rank, reverse=True)
    if head_ends_last and ended and ended[-1].rank == 0 and not ended[-1].has_ended:
        if len(ended) > 1 or timeout is not None:
            ended.pop()
        else:
            ended[-1].has_ended = True
    assert num_returns <= len(ended) or timeout is not None, "it would wait for ever"
    return ended[:num_returns], [ref for ref in refs if ref not in ended[:num_returns]]


def placement_modules(nodes: FakeNodes) -> dict[str, ModuleType]:
    """The modules by which the program places its actors."""
    groups, strategies = (ModuleType(f"ray.util.{n}") for n in ("placement_group", "strategies"))
    groups.__dict__.update(
        placement_group=nodes.group,
        placement_group_table=lambda group: {"bundles_to_node_id": dict(enumerate(group.node_ids))},
        remove_placement_group=nodes.remove,
        PlacementGroup=FakeGroup,
    )
    strategies.__dict__.update(
        PlacementGroupSchedulingStrategy=lambda group, *, placement_group_bundle_index: (
            group,
            placement_group_bundle_index,
        )
    )
    return {
        "ray.util.placement_group": groups,
        "ray.util.scheduling_strategies": strategies,
    }


def fake_ray(
    monkeypatch: pytest.MonkeyPatch,
    draining: Callable[[], dict[str, int]] = dict,
    *,
    head_ends_last: bool = True,
    num_nodes: int = 100,
    num_actors_max: int = 100,
) -> list[dict[str, Any]]:
    """Puts a module in the place of ray; returns the options with which actors will be started.

    Args:
        draining: returns what is drained; this machine is "here".
        head_ends_last: as for `fake_wait`.
        num_nodes: number of machines.
        num_actors_max: actors for which each has room.
    """
    nodes = FakeNodes(num_nodes, num_actors_max)
    started: list[dict[str, Any]] = []
    num_asked = itertools.count()
    ray, util = ModuleType("ray"), ModuleType("ray.util")

    def remote(**options: Any) -> Callable[[type], Any]:
        started.append(options)
        place = options["scheduling_strategy"]
        return lambda cls: SimpleNamespace(remote=lambda: FakeActor(cls, nodes, *place))

    ray.__dict__.update(
        util=util,
        init=lambda: None,
        remote=remote,
        get=FakeRef.get,
        wait=partial(fake_wait, head_ends_last=head_ends_last),
        exceptions=type("exceptions", (), {"RayError": RayFailed, "RayActorError": ActorLost}),
        get_runtime_context=lambda: SimpleNamespace(
            get_node_id=lambda: nodes.current, get_job_id=lambda: "0a000000"
        ),
        kill=nodes.killed.append,
        _private=SimpleNamespace(
            state=SimpleNamespace(state=SimpleNamespace(get_draining_nodes=draining))
        ),
    )

    def address() -> str:
        if next(num_asked) % 2 == 0:  # Ray has not replaced the machine yet, or none is there yet.
            raise ActorLost
        return "127.0.0.1"

    util.__dict__.update(get_node_ip_address=address)
    modules = {"ray": ray, "ray.util": util, **placement_modules(nodes)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return started
