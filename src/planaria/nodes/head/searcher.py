"""The process that searches for answers to losses before they happen, while training goes on.

It is forked from the coordinator's process before that has threads, has a lower priority than the
other processes, and ends with the coordinator. It is sent each plan by which the job trains, and
sends back the answers that it finds for it (policies/ahead.py). Both ends run the same program over
a socket that only they have, so messages can be pickled: plans hold many equal objects, which a
pickle contains once. Answers stay pickled until they are needed.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import select
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.learning.profile_correction import corrected_plans
from planaria.core.plan import PipelineTemplate, Plan, Transition
from planaria.nodes.forkserver import close_others, die_with_parent
from planaria.nodes.head.leader_spec import LeaderSpec, catalog_of
from planaria.planner.plans import PlanCatalog, lazy_plan_catalog
from planaria.planner.problem import Problem
from planaria.policies.ahead import ForeseenAnswers, look_ahead
from planaria.policies.named import layout_search, named_policy
from planaria.policies.policy import Prices

logger = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("!Q")
_NICE: Final = 10


@dataclass(frozen=True, slots=True)
class _SearchRequest:
    """Request for answers to losses of nodes of a plan.

    Attributes:
        number: number of this request; answers to older requests are ignored.
        plan: the plan by which the job trains.
        layer_factors: factors that correct the profile; see
            coordinator/learning/profile_correction.py.
        prices: prices with which answers are compared.
        fitted_problem: problem with raised memory estimates, see
            coordinator/learning/memory_estimates.py; None: none was raised.
        fitted_templates: templates of that problem by number of nodes.
    """

    number: int
    plan: Plan
    layer_factors: tuple[float, ...]
    prices: Prices
    fitted_problem: Problem | None
    fitted_templates: Mapping[int, PipelineTemplate]


class Searcher:
    """The coordinator's handle on the process; must be made before the coordinator has threads.

    Args:
        foreseen: collection to which the answers are added.
        on_found: callback, called with the epoch of a plan once it is known which plans may be
            better for the same nodes.
    """

    def __init__(
        self, spec: LeaderSpec, foreseen: ForeseenAnswers, *, on_found: Callable[[int], None]
    ) -> None:
        self._foreseen = foreseen
        self._on_found = on_found
        self._number = 0
        self._requested: tuple[object, ...] = ()
        self._request: _SearchRequest | None = None
        self._is_alive = True
        self._socket, process_socket = socket.socketpair()
        parent_pid = os.getpid()
        if os.fork() == 0:
            _become(spec, process_socket, parent_pid)
        process_socket.close()

    async def open(self) -> None:
        """Connects to the process; must be called before `request` and `receive_answers`."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)

    def request(self, plan: Plan, learning: Learning, prices: Callable[[], Prices]) -> None:
        """Requests answers for this plan, unless the newest request was for the same.

        Args:
            learning: corrections of the profile, and raised memory estimates.
            prices: function that returns the prices with which answers are compared; called only if
                the request is a new one, because it takes O(nodes) time.
        """
        findings, fitted = learning.findings, learning.fitted
        requested = plan.epoch, findings.layer_factors, findings.more_bytes
        if requested == self._requested:
            return
        self._requested = requested
        self._foreseen.clear()
        if not self._is_alive:  # Without the process, answers are computed when they are needed.
            self._on_found(plan.epoch)
            return
        self._number += 1
        catalog = fitted.catalog if fitted else None
        self._request = _SearchRequest(
            number=self._number,
            plan=plan,
            layer_factors=findings.layer_factors,
            prices=prices(),
            fitted_problem=catalog.problem if catalog else None,
            fitted_templates=catalog.templates if catalog else {},
        )
        self._writer.write(_framed_bytes(self._request))

    async def receive_answers(self) -> None:
        """Receives answers; never returns."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._on_answers(*pickle.loads(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.warning(
                "the process that looks for answers ahead has ended; the job goes on without it"
            )
        self._is_alive = False
        if self._request is not None:
            self._on_found(self._request.plan.epoch)
        await asyncio.get_running_loop().create_future()

    def _on_answers(self, number: int, lost: tuple[int, ...], answers: bytes) -> None:
        request = self._request
        if request is None or number != request.number:
            return
        self._foreseen.add(request.plan, lost, partial(_unpickle, answers))
        if not lost:
            self._on_found(request.plan.epoch)


def _unpickle(answers: bytes) -> tuple[Transition, ...]:
    transitions: tuple[Transition, ...] = pickle.loads(answers)
    return transitions


def _framed_bytes(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


# -- the process ----------------------------------------------------------------------------------


def _become(spec: LeaderSpec, sock: socket.socket, parent_pid: int) -> None:
    """Serves requests in the forked process until the coordinator's process ends; never returns."""
    try:
        die_with_parent(parent_pid)
        close_others({0, 1, 2, sock.fileno()})
        _lower_priority()
        _serve(spec, sock)
    except EOFError:
        logger.debug("the coordinator's process has ended")
    except BaseException:
        logger.exception("no answers are looked for ahead any more")
    finally:
        os._exit(1)


def _lower_priority() -> None:
    """Lowers the priority of this process, so that the processes that train come first.

    If Linux groups tasks by session (autogroup), the nice value of a process counts only within its
    session, and each process of planaria has its own. So the group's nice value is set too.
    """
    os.setsid()
    os.nice(_NICE)
    with contextlib.suppress(OSError):  # The kernel has no autogroups.
        Path("/proc/self/autogroup").write_text(str(_NICE))


def _serve(spec: LeaderSpec, sock: socket.socket) -> None:
    request = _receive_request(sock)
    while True:
        newer = _search(spec, request, sock)
        request = _receive_request(sock) if newer is None else newer


def _search(
    spec: LeaderSpec, request: _SearchRequest, sock: socket.socket
) -> _SearchRequest | None:
    """Sends answers as they are found; returns a newer request, or None if all were found first."""
    catalog = corrected_plans(_catalog(spec, request), request.layer_factors)
    searched = layout_search(spec.job, catalog)
    for foreseen in look_ahead(
        named_policy(spec.job, catalog, searched),
        searched,
        request.plan,
        prices=request.prices,
        failures_ahead=spec.job.resilience.failures_ahead,
    ):
        if foreseen is not None:
            answers = pickle.dumps(foreseen.transitions, pickle.HIGHEST_PROTOCOL)
            sock.sendall(_framed_bytes((request.number, foreseen.lost, answers)))
        if select.select([sock], [], [], 0.0)[0]:
            return _receive_request(sock)
    return None


def _catalog(spec: LeaderSpec, request: _SearchRequest) -> PlanCatalog:
    """The plans of the job, or those by raised memory estimates, which the coordinator has too."""
    if request.fitted_problem is None:
        return catalog_of(spec)
    max_nodes = max(spec.job.cluster.max_nodes, spec.job.cluster.nodes)
    return lazy_plan_catalog(request.fitted_problem, max_nodes, request.fitted_templates)


def _receive_request(sock: socket.socket) -> _SearchRequest:
    length_bytes = sock.recv(_LENGTH.size, socket.MSG_WAITALL)
    if not length_bytes:
        raise EOFError
    (length,) = _LENGTH.unpack(length_bytes)
    request: _SearchRequest = pickle.loads(sock.recv(length, socket.MSG_WAITALL))
    return request
