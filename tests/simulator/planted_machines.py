"""Bugs to plant: the rules of a head and its nodes on different machines, each switched off."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from planaria.coordinator import change, recovery
from planaria.coordinator.contact import HeadContact, Heard
from planaria.coordinator.leadership import Leadership
from planaria.coordinator.membership import standby
from planaria.core.messages import NodeLost
from planaria.protocol.agent_lease import AgentLease, is_given_up
from planaria.simulator.modelled import agent
from planaria.simulator.modelled.leader import _AgentEndpoint


def leases_run_out_while_nobody_is_heard(patch: pytest.MonkeyPatch) -> None:
    """A head that is cut off evicts everybody."""
    patch.setattr(HeadContact, "_uncounted_s", lambda *_: 0.0)


def closed_connections_are_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    """A head whose network fails evicts everybody."""

    def close(self: Leadership[_AgentEndpoint], node: int, connection: _AgentEndpoint) -> None:
        if self._connections.get(node) is connection:
            del self._connections[node]
            self._effects.queue(NodeLost(node=node, reason="its connection closed"))

    patch.setattr(Leadership, "on_disconnect", close)


def any_message_is_an_answer(patch: pytest.MonkeyPatch) -> None:
    """What a node said before the network failed shows that others are lost."""
    hear = HeadContact.hear

    def answered(self: HeadContact, node: int, *, leased: Collection[int], request: int) -> Heard:
        return hear(self, node, leased=leased, request=request or self._num_requests)

    patch.setattr(HeadContact, "hear", answered)


def nodes_have_no_patience(patch: pytest.MonkeyPatch) -> None:
    """A node ends itself as it would beside the head."""

    def given_up(lease: AgentLease, now_s: float, **facts: bool) -> bool:
        return is_given_up(replace(lease, patience_s=0.1), now_s, **facts)

    patch.setattr(agent, "is_given_up", given_up)


def nobody_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A job ends as soon as fewer than n0 nodes are left."""
    for module in (recovery, change, standby):
        patch.setattr(module, "can_await", lambda *_: False)


def who_comes_while_all_wait_is_not_taken(patch: pytest.MonkeyPatch) -> None:
    """Machines come, and the job ends all the same."""
    patch.setattr(recovery, "replacements_at_loss", lambda *_: ())
