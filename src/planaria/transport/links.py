"""Tagged, abortable point-to-point links between ranks over TCP.

`Links` holds a rank's connections to its peers. `send` never blocks: bytes that the kernel does not
take at once are queued, and one thread per process writes them out (serving.py). A message to a
peer whose link is still being made is sent once the link is up. The same thread reads. A message is
a header (epoch, tag, length) and raw bytes; it waits in an inbox under (peer, epoch, tag) until
`receive` takes it. `abort` frees every blocked receive at once and keeps the connections: messages
of an older epoch are dropped on arrival, so a link needs no restart to enter the next epoch.

A link belongs to one worker. When a rank comes back with another address, the old link is closed at
both ends, and what still arrives on it is dropped. When a link breaks before its peer has sent
anything in this epoch, every wait of the epoch ends with a PeerLostError: the peer may not have
entered the epoch yet, and would then wait for messages that were lost with the link.

Differs from Gloo, which cannot be aborted and then sits in its timeout (10 s, measured).
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from planaria.errors import AbortedError, AuthenticationError, PeerLostError
from planaria.transport.connection import (
    Channel,
    Connection,
    IncomingMessage,
    LinkInbox,
    LinkProtection,
    OwnEnd,
    Tag,
)
from planaria.transport.pacing import LinkCallbacks, OutgoingMessage, Pacer, Pacing, Unpaced
from planaria.transport.serving import Handlers, Server
from planaria.transport.sockets import (
    Address,
    Endpoint,
    bare_host,
    connecting_socket,
    endpoints_of,
    is_literal,
    is_own_lack,
    listening_socket,
    no_link_text,
)
from planaria.transport.traffic import Traffic

__all__ = ["Address", "Buffer", "Channel", "Links", "Tag"]

logger = logging.getLogger(__name__)

Buffer = npt.NDArray[Any]

# The timeout of waits that only a lost link or an abort ends: a peer may load its layers for hours.
# The kernel detects a machine that is gone (connection.py), the coordinator a worker that hangs.
UNLIMITED_S: Final = threading.TIMEOUT_MAX

_NEVER = 1 << 62  # An epoch that no job reaches.
_UNPROTECTED: Final = LinkProtection()
_LOOK_S: Final = 0.01  # The kernel does not tell when it has sent all.
# A wait is logged after this time, and whenever its length has doubled.
_LOG_AFTER_S: Final = 600.0


class Links:
    """A rank's links to its peers.

    Args:
        host: name or address of this machine that peers connect to; see `listening_socket`.
        pacing: the modelled links whose speed messages keep to; None: messages are not slowed down.
        protection: protection against damage, absurd messages and strangers.

    Attributes:
        address: host and port at which peers reach this rank.
        sent_bytes, received_bytes: bytes of payload, by channel.
        state_bytes: bytes of payload received on the channel STATE, by epoch.
        linked_s: moment at which all links of the epoch were up, by the monotonic clock; 0.0: they
            are not up yet.
        cuts: the cuts between this rank and its peers.
        leave_to_parent: closes the sockets in a forked child, which would keep them open when its
            parent dies.
        timekeeper: time of the work of threads that send and receive.
        traffic: messages of training that use the links to and from other nodes.
    """

    def __init__(
        self,
        rank: int,
        *,
        token: bytes,
        host: str = "127.0.0.1",
        pacing: Pacing | None = None,
        protection: LinkProtection = _UNPROTECTED,
    ) -> None:
        self.rank = rank
        self.epoch = 0
        self.sent_bytes: Counter[Channel] = Counter()
        self.received_bytes: Counter[Channel] = Counter()
        self.state_bytes: Counter[int] = Counter()
        self.linked_s = 0.0
        self._listener = listening_socket(host)
        self.address: Address = bare_host(host), self._listener.getsockname()[1]
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # Guards all that follows.
        self._inbox = LinkInbox()
        identity, memory_for = (rank, self.address[1]), self._inbox.memory_for
        self._own = OwnEnd(token, identity, memory_for, self._is_over, protection)
        self._peers: dict[int, Connection] = {}
        self._connecting: dict[int, Connection] = {}
        self._lost: dict[int, str] = {}
        self._addresses: dict[int, Address] = {}  # Of all ranks of the epoch.
        self._ports: dict[int, int] = {}  # The listening ports of the epoch's peers.
        self._awaited: set[int] = set()  # Peers of the epoch to which no link is up.
        self._senders: set[int] = set()  # Peers that have sent something in this epoch.
        # Messages to peers whose link is not up yet.
        self._queued_messages: dict[int, list[list[memoryview]]] = {}
        self._first_epoch = 0
        self._abort_reason = ""
        self._failure: Exception | None = None
        self._lack: OSError | MemoryError | None = None  # Of this machine in this epoch.
        self.traffic = Traffic()
        on_failure = self._on_thread_failure
        callbacks = LinkCallbacks(
            lock, self._checked_link, self._transmit, self._deliver, on_failure, self.traffic
        )
        self._is_paced = pacing is not None
        self._pacer = Pacer(rank, pacing, callbacks) if pacing else Unpaced(callbacks)
        self.timekeeper = self._pacer.timekeeper
        self._server = Server(
            rank,
            self._listener,
            Handlers(
                on_accept=lambda s: self._server.add(Connection(s, self._own, target=-1, port=0)),
                on_link_up=self._on_link_up,
                on_message=self._pacer.receive,
                on_lost=self._on_link_lost,
                on_lack=self._on_lack,
                on_failure=on_failure,
                on_end=self._on_thread_end,
            ),
            num_ranks=protection.num_ranks,
        )
        self.cuts, self.leave_to_parent = self._server.cuts, self._server.leave_to_parent
        self._server.start()

    # -- what the rank calls -----------------------------------------------------------------

    def begin(
        self,
        epoch: int,
        *,
        addresses: Mapping[int, Address],
        peers: Collection[int],
        timeout_s: float,
    ) -> None:
        """Enters an epoch and waits for its links: calls `enter`, then `wait_linked`."""
        self.enter(epoch, addresses=addresses, peers=peers)
        self.wait_linked(timeout_s=timeout_s)

    def enter(
        self, epoch: int, *, addresses: Mapping[int, Address], peers: Collection[int]
    ) -> None:
        """Enters an epoch and begins to make the missing links to `peers`; existing ones are kept.

        The lower rank of a pair connects, the higher one accepts.

        Args:
            addresses: addresses of all ranks of the epoch. An older link to a rank that is not
                among them, or now listens elsewhere, is closed.

        Raises:
            PeerLostError: a connection to a peer failed at once.
            OSError: this machine lacks descriptors or memory for a socket.
            AbortedError: the epoch was aborted before it began.
        """
        assert self.rank not in peers
        assert epoch >= self.epoch, (epoch, self.epoch)
        with self._changed:
            self._check_epoch(epoch)
            old_connections = tuple(self._peers.values())
            self.epoch = epoch
            self.linked_s = 0.0
            self._lack = None
            self._lost.clear()
            self._queued_messages.clear()
            self._senders = self._inbox.begin_epoch(epoch)
            self._retire({rank: address[1] for rank, address in addresses.items()})
            self._addresses = dict(addresses)
            self._ports = {peer: addresses[peer][1] for peer in peers}
            self._awaited = set()
            self._note_links(peers)
            for peer in self._ports.keys() - self._awaited:
                self._peers[peer].is_used = True
            # A link that is being made may be up at any moment after this.
            missing = {p for p in self._awaited - self._connecting.keys() if p > self.rank}
            self._changed.notify_all()  # Frees threads that still wait in an older epoch.
        # The condition is not held, for `withdraw_memory` waits for a read that is in progress.
        for connection in old_connections:
            connection.withdraw_memory()
        named = {p: addresses[p] for p in missing if not is_literal(bare_host(addresses[p][0]))}
        for peer in sorted(missing - named.keys()):
            self._connect(peer, addresses[peer])
        if named:
            # Nobody may have to wait for a resolver that does not answer.
            threading.Thread(
                target=self._connect_named, args=(epoch, named), name="resolver", daemon=True
            ).start()

    def wait_linked(self, *, timeout_s: float) -> None:
        """Blocks until the links to all peers of the epoch are up.

        Raises:
            PeerLostError: a link broke, or a peer could not be reached within timeout_s.
            OSError, MemoryError: this machine lacks descriptors or memory in this epoch.
            AbortedError: the epoch was aborted.
        """
        with self._changed:
            epoch, peers = self.epoch, self._ports.keys()
            self._wait(lambda: not self._awaited, epoch=epoch, peers=peers, timeout_s=timeout_s)

    def send(self, peer: int, tag: Tag, *buffers: Buffer, virtual_bytes: int = 0) -> None:
        """Sends contiguous arrays as one message; never blocks.

        The arrays must not change until the peer has received them, or all ranks have left the
        epoch.

        Args:
            virtual_bytes: the size that paced links assume for the message; 0: its real size.

        Raises:
            PeerLostError: no link to the peer is up or being made.
        """
        views = [array.reshape(-1).view(np.uint8).data for array in buffers if array.size]
        num_bytes = sum(len(view) for view in views)
        self._pacer.send(peer, OutgoingMessage(self.epoch, tag, views, virtual_bytes or num_bytes))
        self.sent_bytes[tag.channel] += num_bytes

    def receive(self, peer: int, tag: Tag, *, timeout_s: float) -> npt.NDArray[np.uint8]:
        """The bytes that the peer sent under the tag in this epoch; blocks until they have arrived.

        A message that arrived before the peer was lost or the epoch aborted can still be received.

        Raises:
            PeerLostError: the link broke, nothing came within timeout_s, or the link to another
                peer broke before that peer had sent anything in this epoch.
            AbortedError: `abort` was called, or another thread began a newer epoch.
        """
        return self.receive_any({peer: tag}, timeout_s=timeout_s)[1]

    def receive_any(
        self, wanted: Mapping[int, Tag], *, timeout_s: float
    ) -> tuple[int, npt.NDArray[np.uint8]]:
        """Blocks until one of several messages has arrived, and takes it; raises as `receive` does.

        Args:
            wanted: tag of the wanted message, by peer.

        Returns:
            The peer, and the bytes that it sent.
        """
        with self._changed:
            epoch = self.epoch
            self._wait(lambda: self.has_any(wanted), epoch=epoch, peers=wanted, timeout_s=timeout_s)
            arrived = self._inbox.first(wanted, epoch)
            assert arrived is not None
            peer, tag = arrived
            payload, due_s = self._inbox.take(peer, epoch, tag)
            self.timekeeper.reach(due_s)
            return peer, payload

    def has_any(self, wanted: Mapping[int, Tag]) -> bool:
        """Whether one of these messages has arrived and was not taken.

        Args:
            wanted: tag of the wanted message, by peer.
        """
        return self._inbox.first(wanted, self.epoch) is not None

    @property
    def lost_peers(self) -> dict[int, str]:
        """The peers whose links have broken in this epoch, with the reasons."""
        with self._changed:
            return dict(self._lost)

    def silence_s(self, peer: int) -> float:
        """Seconds since bytes last came from a peer, be they of a message that still arrives.

        Infinity if no link to it is up.
        """
        with self._changed:
            connection = self._peers.get(peer)
            return time.monotonic() - connection.heard_s if connection else inf

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = UNLIMITED_S) -> bool:
        """Blocks until a condition on messages and links is true.

        Returns:
            False: it is not yet, or the epoch is over, or the links are closed.
        """
        with self._changed:
            epoch = self.epoch

            def is_over() -> bool:
                return bool(self._failure or self._lack) or self._is_over(epoch)

            self._changed.wait_for(lambda: condition() or is_over(), timeout=timeout_s)
            return condition() and not is_over()

    def offer_memory(self, peer: int, tag: Tag, memory: npt.NDArray[np.uint8]) -> None:
        """Has a message of this epoch arrive in the given memory.

        That happens if the message has not begun to arrive, and has as many bytes as the memory.
        Nothing is written to the memory once a newer epoch has begun.
        """
        self._inbox.offer_memory(peer, self.epoch, tag, memory)

    def take_receptions(self) -> dict[int, tuple[int, float]]:
        """Returns (bytes, seconds) of large messages that came since the last call, by peer.

        Only peers on other machines have entries, and paced links none.
        """
        own_host = self.address[0]
        return {
            peer: sums
            for peer, sums in self._own.receptions.take().items()
            if not self._is_paced and self._addresses.get(peer, self.address)[0] != own_host
        }

    def abort(self, reason: str, *, first_epoch: int) -> None:
        """Ends all epochs before `first_epoch`: their blocked operations raise an AbortedError."""
        with self._changed:
            if first_epoch > self._first_epoch:
                self._first_epoch = first_epoch
                self._abort_reason = reason
            self._changed.notify_all()

    def check_epoch(self) -> None:
        """Raises an AbortedError if the epoch has been aborted."""
        with self._changed:
            self._check_epoch(self.epoch)

    def drain(self, *, timeout_s: float) -> None:
        """Blocks until the machines of peers have all that was sent, or the time is over."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            connections = tuple(self._peers.values())
        while not all(c.is_drained() for c in connections) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Writes what the kernel takes now, then closes every socket. Idempotent."""
        self.abort("links closed", first_epoch=_NEVER)
        self._pacer.close()
        self._server.close()

    # -- helpers ------------------------------------------------------------------------------

    def _transmit(self, peer: int, outgoing: OutgoingMessage) -> None:
        """Writes what the kernel takes of a message now, and has the serving thread write the rest.

        Raises:
            PeerLostError: no link to the peer is up or being made.
        """
        message = outgoing.parts(is_checked=self._own.protection.is_checked)
        connection = self._link(peer)
        if connection is None:
            with self._changed:
                connection = self._checked_link(peer)
                if connection is None:
                    self._queued_messages.setdefault(peer, []).append(message)
                    return
        is_done = False
        # After an error the serving thread writes too, sees it and reports it.
        with connection.lock, suppress(OSError, AuthenticationError):
            is_done = connection.append(message)
        if not is_done:
            self._server.write(connection)

    def _checked_link(self, peer: int) -> Connection | None:
        """The link to the peer; None if it is being made.

        Raises:
            PeerLostError: no link to the peer is up or being made.
        """
        with self._changed:
            connection = self._link(peer)
            if connection is None:
                self._check_alive()
                if peer not in self._ports or peer in self._lost:
                    raise PeerLostError(peer, self._lost.get(peer, "no link"))
            return connection

    def _link(self, peer: int) -> Connection | None:
        """The link to the peer's worker of this epoch; None if there is none yet."""
        connection = self._peers.get(peer)
        if connection is None or self._ports.get(peer, connection.port) != connection.port:
            return None
        return connection

    def _note_links(self, peers: Iterable[int]) -> None:
        """Notes that links to `peers` have come or gone. The condition must be held."""
        self._awaited.difference_update(peers)
        self._awaited.update(p for p in self._ports.keys() & peers if self._link(p) is None)
        if not self.linked_s and not self._awaited:
            self.linked_s = time.monotonic()

    def _retire(self, ports: Mapping[int, int]) -> None:
        """Closes the links whose peer is not among `ports`, or listens at another port by now.

        Accepted links that no epoch has used yet are kept: they may belong to a later epoch.
        """
        for links in (self._peers, self._connecting):
            for rank, connection in list(links.items()):
                is_old = connection.is_used or connection.target >= 0
                if is_old and ports.get(rank) != connection.port:
                    del links[rank]
                    self._pacer.forget(rank)
                    self._server.retire(connection)

    def _wait(
        self, condition: Callable[[], bool], *, epoch: int, peers: Collection[int], timeout_s: float
    ) -> None:
        """Blocks until `condition` is true, which counts even if peers are lost or the epoch over.

        The condition variable must be held. Raises as `receive` does.

        Args:
            peers: ranks that are waited for.
        """

        def lost_peers() -> list[int]:
            silent = self._ports.keys() - self._senders
            return [peer for peer in self._lost if peer in peers or peer in silent]

        def is_over() -> bool:
            has_ended = bool(self._failure or self._lack) or self._is_over(epoch)
            return condition() or has_ended or bool(self._lost and lost_peers())

        begin_s = time.monotonic()
        waits_s = min(timeout_s, _LOG_AFTER_S)
        while not self._changed.wait_for(is_over, timeout=begin_s + waits_s - time.monotonic()):
            if waits_s >= timeout_s:
                break
            waited_s = time.monotonic() - begin_s
            text = "rank %s has waited for ranks %s for %.0f s; they are not lost, so it goes on"
            logger.warning(text, self.rank, sorted(peers), waited_s)
            waits_s = min(timeout_s, 2 * waited_s)
        if condition():
            return
        self._check_alive()
        self._check_epoch(epoch)
        if self._lack is not None:
            raise self._lack
        for peer in lost_peers():
            raise PeerLostError(peer, self._lost[peer])
        silent = set(peers) - self._peers.keys() or peers
        reason = f"nothing came for {timeout_s:.1f} s"
        if min(silent) in self._awaited:
            reason = no_link_text(self._addresses[min(silent)], self.address, reason)
        raise PeerLostError(min(silent), reason)

    def _is_over(self, epoch: int) -> bool:
        """Whether an epoch was aborted, or a newer one has begun."""
        return epoch < max(self._first_epoch, self.epoch)

    def _check_epoch(self, epoch: int) -> None:
        """Raises an AbortedError if the epoch is over. The condition must be held."""
        if not self._is_over(epoch):
            return
        reason = f"epoch {self.epoch} has begun"
        if epoch < self._first_epoch:
            reason = self._abort_reason
        raise AbortedError(f"rank {self.rank}, epoch {epoch}: {reason}")

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise AssertionError("the links' thread died") from self._failure

    def _connect(self, peer: int, address: Address) -> None:
        try:
            self._connect_first(endpoints_of(address), peer, address[1])
        except OSError as error:
            if is_own_lack(error):
                raise
            raise PeerLostError(peer, no_link_text(address, self.address, str(error))) from error

    def _connect_named(self, epoch: int, addresses: Mapping[int, Address]) -> None:
        """Begins to connect to peers at names while the epoch lasts."""
        for peer, address in addresses.items():
            try:
                endpoints = endpoints_of(address)
                with self._changed:
                    if self._is_over(epoch):
                        return
                    self._connect_first(endpoints, peer, address[1])
            except OSError as error:
                with self._changed:
                    if self._is_over(epoch):
                        return
                    if is_own_lack(error):
                        self._on_lack(error)
                        return
                    self._lost[peer] = no_link_text(address, self.address, str(error))
                    self._changed.notify_all()

    def _connect_first(self, endpoints: list[Endpoint], peer: int, port: int) -> None:
        """Begins to connect to the first endpoint that does not fail at once, or raises OSError."""
        sock = connecting_socket(endpoints)
        with self._changed:
            connection = Connection(sock, self._own, target=peer, port=port, untried=endpoints)
            self._connecting[peer] = connection
            self._server.add(connection)

    # -- what the thread that serves the links calls --------------------------------------------

    def _on_link_up(self, connection: Connection) -> None:
        """Makes the connection the link to its peer, and sends the messages that wait for it."""
        peer = connection.peer
        with self._changed:
            if connection.target >= 0 and self._connecting.get(peer) is not connection:
                return  # It is retired.
            self._connecting.pop(peer, None)
            older = self._peers.get(peer)
            with connection.lock:  # Later messages wait for the lock, so they come after these.
                self._peers[peer] = connection
                if self._ports.get(peer) == connection.port:
                    connection.is_used = True
                    for message in self._queued_messages.pop(peer, ()):
                        connection.append(message)
            if older is not None:
                older.withdraw_memory()
                # The peer's worker was forked again.
                self._server.retire(older)
                if older.is_used:  # The epoch relied on the old worker.
                    self._lost[peer] = "it came back on a new link"
            self._note_links([peer])
            if peer in self._lost or not self._awaited:
                self._changed.notify_all()

    def _deliver(self, connection: Connection, message: IncomingMessage, due_s: float) -> None:
        """Puts a message that has arrived into the inbox, unless its epoch or its link is over."""
        self.received_bytes[message.tag.channel] += len(message.payload)
        if message.tag.channel is Channel.STATE:
            self.state_bytes[message.epoch] += len(message.payload)
        with self._changed:
            is_current = self._peers.get(connection.peer) is connection
            if message.epoch >= self.epoch and is_current:
                if message.epoch == self.epoch:
                    self._senders.add(connection.peer)
                self._inbox.add(connection.peer, message, due_s)
                self._changed.notify_all()

    def _on_link_lost(self, connection: Connection, reason: str) -> None:
        target = connection.target
        with self._changed:
            if connection.untried and self._connecting.get(target) is connection:
                try:  # The name of a machine may have several addresses.
                    self._connect_first(connection.untried, target, connection.port)
                    return
                except OSError as error:
                    if is_own_lack(error):
                        self._on_lack(error)
            if connection.peer < 0 and target in self._addresses:
                reason = no_link_text(self._addresses[target], self.address, reason)
            self._pacer.deliver_arrived(connection)
            for links in (self._peers, self._connecting):
                for rank in [r for r, link in links.items() if link is connection]:
                    del links[rank]
                    if self._lack is None:
                        self._lost[rank] = reason
                    self._pacer.forget(rank)
                    self._note_links([rank])
            self._changed.notify_all()

    def _on_lack(self, error: OSError | MemoryError) -> None:
        """Has all waits of this epoch raise the error; the next one may find what lacks now."""
        with self._changed:
            if not self._is_over(self.epoch):
                self._lack = error
                self._changed.notify_all()

    def _on_thread_failure(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._peers.clear()  # So that `send` raises, too.
            self._changed.notify_all()

    def _on_thread_end(self) -> None:
        with self._changed:
            self._lost.update(dict.fromkeys((*self._peers, *self._ports), "links closed"))
            self._peers.clear()
            self._queued_messages.clear()
