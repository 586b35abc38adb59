"""Links when something is wrong: lost peers, strangers, mistakes, and the end."""

import resource
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from helpers.linked_ranks import (
    TIMEOUT_S,
    TOKEN,
    addresses,
    begin_all,
    blocked_receive,
    in_threads,
    link_ranks,
    no_descriptors,
    num_descriptors,
    payload,
    received,
    tag,
    wait_until,
)
from planaria.errors import AbortedError, PeerLostError
from planaria.transport import connection, sockets
from planaria.transport.frames import Role, handshake
from planaria.transport.links import Links
from planaria.transport.serving import ACCEPT_PAUSE_S
from planaria.transport.sockets import is_literal

LARGE = 3 << 20  # float64 numbers: 24 MiB, more than any socket buffer


def test_a_lost_peer_is_named_and_what_it_said_still_counts() -> None:
    """The messages that arrived before the end can be taken, the others are lost with it."""
    with link_ranks(3) as (left, middle, right):
        right.send(1, tag(0), payload(3))
        assert received(middle, 2, 0) == payload(3).tolist()
        right.send(0, tag(0), payload(3))
        right.close()
        thread, errors = blocked_receive(middle, 0)
        wait_until(lambda: 2 in left._lost)

        assert received(left, 2, 0) == payload(3).tolist()
        with pytest.raises(PeerLostError) as lost:
            left.receive(2, tag(1), timeout_s=TIMEOUT_S)
        assert lost.value.rank == 2
        with pytest.raises(PeerLostError) as unsendable:
            left.send(2, tag(2), payload(1))
        assert unsendable.value.rank == 2
        assert not errors  # Who waits for another peer goes on waiting.
        left.send(1, tag(99), payload(1))
        thread.join(TIMEOUT_S)
        assert not errors


def test_a_lost_peer_frees_who_waits_for_it() -> None:
    """At once, not after the timeout of the receive."""
    with link_ranks(2) as (left, right):
        thread, errors = blocked_receive(left, 1)
        right.close()
        thread.join(TIMEOUT_S / 2)

        assert not thread.is_alive()
        assert isinstance(errors[0], PeerLostError)


def test_what_a_peer_sent_before_it_died_arrives_with_its_end() -> None:
    """The bytes and the end of the stream are often read in one go."""
    for _ in range(20):
        with link_ranks(2) as (left, right):
            for index in range(10):
                right.send(0, tag(index), payload(index))
            right.close()
            for index in range(10):
                assert received(left, 1, index) == payload(index).tolist()


def test_begin_without_a_peer_names_it() -> None:
    """Nobody listens there, or nobody comes."""
    gone = Links(2, token=TOKEN)
    gone.close()
    links = Links(1, token=TOKEN)
    with pytest.raises(PeerLostError) as refused:
        links.begin(0, addresses={2: gone.address}, peers=(2,), timeout_s=TIMEOUT_S)
    with pytest.raises(PeerLostError, match="nothing came") as silent:
        links.begin(1, addresses={0: gone.address}, peers=(0,), timeout_s=0.05)
    links.close()

    assert refused.value.rank == 2
    assert silent.value.rank == 0


@dataclass
class Resolver:
    """A resolver that knows one name, "a-rank"; it says nothing before `may_answer` is set."""

    may_answer: threading.Event
    num_answers: int = 0


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    """The resolver that this process asks."""
    made, of_system = Resolver(threading.Event()), socket.getaddrinfo

    def resolve(host: str, *arguments: Any, **keys: Any) -> Any:
        if not is_literal(host):
            made.may_answer.wait(TIMEOUT_S / 2)
            made.num_answers += 1
            if host != "a-rank":
                raise socket.gaierror("no such name")
        return of_system("127.0.0.1", *arguments, **keys)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    yield made
    made.may_answer.set()


def test_a_resolver_that_does_not_answer_holds_up_no_other_link_and_no_abort(
    resolver: Resolver,
) -> None:
    """A rank that is stuck in it would answer no order until it is killed."""
    with closing(Links(0, token=TOKEN)) as left, closing(Links(1, token=TOKEN)) as right:
        places = addresses([left, right]) | {2: ("a-rank", 1)}
        left.enter(0, addresses=places, peers=(1, 2))
        right.begin(0, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), payload(1))
        assert received(right, 0, 0) == payload(1).tolist()
        left.abort("a member is lost", first_epoch=1)
        with pytest.raises(AbortedError):
            left.wait_linked(timeout_s=TIMEOUT_S)

        assert resolver.num_answers == 0


def test_a_rank_at_a_name_is_linked_once_the_name_resolves(resolver: Resolver) -> None:
    """What is sent before waits for it; a name that does not resolve is a rank that is lost."""
    with closing(Links(0, token=TOKEN)) as left, closing(Links(1, token=TOKEN)) as right:
        places = addresses([left, right]) | {1: ("a-rank", right.address[1])}
        left.enter(0, addresses=places, peers=(1,))
        left.send(1, tag(0), payload(1))
        resolver.may_answer.set()
        right.begin(0, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)
        assert received(right, 0, 0) == payload(1).tolist()

        with pytest.raises(PeerLostError, match="no such name") as lost:
            left.begin(1, addresses=places | {2: ("b", 1)}, peers=(1, 2), timeout_s=TIMEOUT_S)
        assert lost.value.rank == 2


def test_begin_goes_on_where_a_timed_out_one_left_off() -> None:
    """The peer comes late: one link serves, none is left over."""
    left, right = Links(0, token=TOKEN), Links(1, token=TOKEN)
    places = addresses([left, right])
    with pytest.raises(PeerLostError):
        right.begin(0, addresses=places, peers=(0,), timeout_s=0.01)
    descriptors = num_descriptors()
    begin_all([left, right], 1)
    begin_all([left, right], 2)
    left.send(1, tag(0), payload(1))

    assert received(right, 0, 0) == payload(1).tolist()
    assert num_descriptors() == descriptors + 2
    left.close()
    right.close()


def _is_in_epoch(links: Links, epoch: int) -> bool:
    return links.epoch == epoch


@pytest.mark.parametrize("noticed", [False, True], ids=["late", "first"])
@pytest.mark.parametrize("rank", [0, 2], ids=["calling", "called"])
def test_a_rank_that_comes_back_is_linked_anew(rank: int, noticed: bool) -> None:
    """Its new worker listens elsewhere, whether the old link broke before or is noticed later."""
    for _ in range(5):
        with link_ranks(3) as ranks:
            old, stays = ranks[rank], ranks[1]
            back = Links(rank, token=TOKEN)
            ranks[rank] = back
            if noticed:
                old.close()
                wait_until(partial(_has_lost, stays, rank))
            with in_threads(partial(begin_all, ranks, 1)) as (begun,):
                wait_until(partial(_is_in_epoch, stays, 1))
                old.close()
                begun.result(timeout=TIMEOUT_S)
            back.send(1, tag(0), payload(4))
            stays.send(rank, tag(0), payload(5))

            assert received(stays, rank, 0) == payload(4).tolist()
            assert received(back, 1, 0) == payload(5).tolist()


def _has_lost(links: Links, peer: int) -> bool:
    return peer in links._lost


def test_a_worker_that_comes_back_frees_who_waits_for_the_old_one() -> None:
    """The old worker's node hangs: its socket stays open, but its rank is somebody else now."""
    with link_ranks(2) as ranks:
        hung, stays = ranks
        thread, errors = blocked_receive(stays, 0)
        back = Links(0, token=TOKEN)
        back.begin(1, addresses=addresses([back, stays]), peers=(1,), timeout_s=TIMEOUT_S)
        thread.join(TIMEOUT_S)
        wait_until(lambda: not hung._peers)

        assert isinstance(errors[0], PeerLostError)
        assert "came back" in str(errors[0])
        back.close()


def test_a_worker_that_died_unseen_before_its_first_epoch_is_not_waited_for() -> None:
    """Its link stands, and it was told of an epoch that this rank skipped."""
    right = Links(1, token=TOKEN)
    died = _raw_link(right, rank=0, port=7)
    back = Links(0, token=TOKEN)
    places = addresses([back, right])
    with in_threads(lambda: right.begin(2, addresses=places, peers=(0,), timeout_s=TIMEOUT_S)) as (
        begun,
    ):
        wait_until(lambda: right.epoch == 2)
        back.begin(2, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)
        begun.result(timeout=TIMEOUT_S)
    right.send(0, tag(0), payload(1))
    back.send(1, tag(0), payload(2))

    assert received(back, 1, 0) == payload(1).tolist()
    assert received(right, 0, 0) == payload(2).tolist()
    assert died.recv(1) == b""
    for links in (back, right):
        links.close()
    died.close()


def test_what_a_link_still_brings_when_its_worker_was_replaced_is_dropped() -> None:
    """It was read before the epoch began that knows another worker, and is put after: the order is
    forced by the lock that both wait for. The new worker may use the same tag in that epoch."""
    links = Links(1, token=TOKEN)
    replaced = _raw_link(links, rank=0, port=7)
    links.begin(1, addresses={0: ("127.0.0.1", 7)}, peers=(0,), timeout_s=TIMEOUT_S)
    with links._changed:
        replaced.sendall(connection.header(2, tag(0), 8) + b"12345678")
        wait_until(lambda: links.received_bytes[tag(0).channel] == 8)
        links.enter(2, addresses={0: ("127.0.0.1", 8)}, peers=(0,))
    assert replaced.recv(1) == b""  # The serving thread is through with it.

    assert not links.has_any({0: tag(0)})
    replaced.close()
    links.close()


def test_a_peer_that_is_lost_before_its_link_stands_is_told_to_who_counted_on_it() -> None:
    """What was queued for it is lost with it; whoever waits for it, or sends more, hears of it."""
    links = Links(0, token=TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links.enter(1, addresses={1: listener.getsockname()}, peers=(1,))
        links.send(1, tag(0), payload(1))
        listener.accept()[0].close()
        with pytest.raises(PeerLostError) as lost:
            links.receive(1, tag(0), timeout_s=TIMEOUT_S)

    assert lost.value.rank == 1
    with pytest.raises(PeerLostError):
        links.wait_linked(timeout_s=TIMEOUT_S)
    with pytest.raises(PeerLostError):
        links.send(1, tag(1), payload(1))
    links.close()


def test_a_link_to_a_rank_that_is_gone_for_good_is_closed() -> None:
    """A hung node keeps its socket open: what is queued for it would stay for ever."""
    with link_ranks(3) as (left, middle, hung):
        places = addresses([left, middle])
        with in_threads(
            lambda: left.begin(1, addresses=places, peers=(1,), timeout_s=TIMEOUT_S),
            lambda: middle.begin(1, addresses=places, peers=(0,), timeout_s=TIMEOUT_S),
        ):
            wait_until(lambda: not hung._peers)

        with pytest.raises(PeerLostError):
            left.send(2, tag(0), payload(1))


def test_memory_of_a_lost_peers_messages_is_given_back() -> None:
    """Nobody takes what an aborted epoch left; the next begin drops it."""
    with link_ranks(3) as (left, middle, right):
        for index in range(10):
            right.send(0, tag(index), payload(index))
        wait_until(lambda: len(left._inbox) == 10)
        right.close()
        places = addresses([left, middle])
        left.begin(1, addresses=places, peers=(1,), timeout_s=TIMEOUT_S)

        assert not left._inbox


def test_a_client_with_another_token_is_refused_and_harmless() -> None:
    """It gets no link, and those of the job go on."""
    with link_ranks(2) as ranks:
        stranger = Links(0, token=b"another")
        with pytest.raises(PeerLostError) as refused:
            stranger.begin(0, addresses={1: ranks[1].address}, peers=(1,), timeout_s=TIMEOUT_S)
        stranger.close()
        before = dict(ranks[1]._peers)
        ranks[0].send(1, tag(0), payload(1))

        assert refused.value.rank == 1
        assert received(ranks[1], 0, 0) == payload(1).tolist()
        assert before == ranks[1]._peers


def test_another_rank_at_the_address_is_not_taken_for_the_peer() -> None:
    """A port may have been given to another worker of the same job."""
    links, other = Links(0, token=TOKEN), Links(2, token=TOKEN)
    with pytest.raises(PeerLostError, match="answers for rank 1") as lost:
        links.begin(0, addresses={1: other.address}, peers=(1,), timeout_s=TIMEOUT_S)
    links.close()
    other.close()

    assert lost.value.rank == 1


def _raw_link(links: Links, *, rank: int, port: int) -> socket.socket:
    """A link of a worker of `rank` that listens at `port`, made by hand, blocking."""
    sock = socket.create_connection(links.address, timeout=TIMEOUT_S)
    steps = handshake(TOKEN, Role.CONNECT, identity=port << 32 | rank)
    data, num_bytes = next(steps)
    for _ in range(2):
        sock.sendall(data)
        read = b""
        while len(read) < num_bytes:
            read += sock.recv(num_bytes - len(read))
        try:
            data, num_bytes = steps.send(read)
        except StopIteration:
            break
    wait_until(lambda: rank in links._peers)
    return sock


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack("!IBIIIQ", 0, 77, 0, 0, 0, 8) + b"12345678",
        struct.pack("!IBIIIQ", 0, 1, 0, 0, 0, 1 << 63),
    ],
    ids=["channel", "length"],
)
def test_nonsense_from_a_peer_ends_its_link_alone(garbage: bytes) -> None:
    """The thread that serves all links must not die of it."""
    with link_ranks(2) as (left, right):
        with _raw_link(right, rank=5, port=7) as sock:
            sock.sendall(garbage)
            with pytest.raises(PeerLostError, match="does not come from this job"):
                right.receive(5, tag(0), timeout_s=TIMEOUT_S)
        left.send(1, tag(0), payload(1))

        assert received(right, 0, 0) == payload(1).tolist()


def test_a_length_for_which_there_is_no_memory_ends_its_link_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job without a profile does not know how long its messages are."""
    make: Any = np.empty

    def empty(shape: Any, **options: Any) -> Any:
        if shape == 1 << 40:
            raise MemoryError
        return make(shape, **options)

    monkeypatch.setattr(np, "empty", empty)
    test_nonsense_from_a_peer_ends_its_link_alone(
        struct.pack("!IBIIIQ", 0, 1, 0, 0, 0, 1 << 40) + b"12345678"
    )


def test_clients_that_talk_garbage_or_nothing_disturb_nobody() -> None:
    """Random bytes, half a hello, silence, and a connect that is closed at once."""
    with link_ranks(2) as (left, right):
        hello, _ = next(handshake(TOKEN, Role.CONNECT, identity=0))
        before = dict(right._peers)
        clients = [socket.create_connection(right.address, timeout=TIMEOUT_S) for _ in range(4)]
        clients[0].sendall(np.random.default_rng(0).bytes(5000))
        clients[1].sendall(hello[:20])
        clients[2].sendall(hello)  # Says who it is and never proves it.
        clients[3].close()
        left.send(1, tag(0), payload(1))

        assert received(right, 0, 0) == payload(1).tolist()
        assert before == right._peers
        for client in clients:
            client.close()


def test_a_flood_of_half_open_links_keeps_no_peer_out(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it use up files, or fill the log: the port of a rank is open to its network."""
    strangers = deque[socket.socket]()
    with _files(1200), link_ranks(2) as (left, right):
        for index in range(2000):
            strangers.append(socket.create_connection(right.address, timeout=TIMEOUT_S))
            if len(strangers) > 400:
                strangers.popleft().close()
            if index == 1000:
                left.send(1, tag(0), payload(1))
        num_open = num_descriptors()

        assert received(right, 0, 0) == payload(1).tolist()
        for stranger in strangers:
            stranger.close()
    assert num_open < 1100
    assert "Too many open files" not in caplog.text
    assert len(caplog.records) < 10


@contextmanager
def _files(num_files: int) -> Iterator[None]:
    """This process may open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_link_that_nobody_takes_from_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one to a machine that is gone with bytes on their way, of which keep-alive says nothing:
    it would stand for a quarter of an hour."""
    monkeypatch.setattr(sockets, "_LOST_S", 0.1)
    links = Links(1, token=TOKEN)
    silent = _raw_link(links, rank=0, port=7)
    links.begin(1, addresses={0: ("127.0.0.1", 7)}, peers=(0,), timeout_s=TIMEOUT_S)
    links.send(0, tag(0), np.zeros(LARGE))
    with pytest.raises(PeerLostError, match="timed out"):
        links.receive(0, tag(0), timeout_s=TIMEOUT_S)

    silent.close()
    links.close()


def test_a_client_that_says_nothing_is_closed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or strangers could use up all descriptors of a rank."""
    monkeypatch.setattr(connection, "HANDSHAKE_TIMEOUT_S", 0.05)
    links = Links(0, token=TOKEN)
    with socket.create_connection(links.address, timeout=TIMEOUT_S) as client:
        data = b""
        while more := client.recv(4096):
            data += more
        links.close()

    assert len(data) > 0  # The hello of the rank, then the end of the stream.


def test_a_rank_without_descriptors_serves_its_links_and_accepts_again_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever calls meanwhile stays in the kernel's queue; it is tried once in a while, not all the
    time, and told of once, though one was accepted in between."""
    with link_ranks(2) as (left, right), socket.socket() as caller, socket.socket() as again:
        server, tried_s = right._server, []
        accept = server._accept

        def timed_accept() -> None:
            tried_s.append(time.monotonic())
            accept()

        monkeypatch.setattr(server, "_accept", timed_accept)
        with no_descriptors():
            caller.connect(right.address)
            wait_until(lambda: len(tried_s) == 3)
            for index in range(100):
                left.send(1, tag(index), payload(index))
                assert received(right, 0, index) == payload(index).tolist()
            gaps_s = [after - before for before, after in pairwise(tried_s)]
        caller.settimeout(TIMEOUT_S)
        is_accepted = bool(caller.recv(1))  # Of the handshake.
        num_tried = len(tried_s)
        with no_descriptors():
            again.connect(right.address)
            wait_until(lambda: len(tried_s) > num_tried)
            wait_until(lambda: not server._is_listening)

        assert is_accepted
        told = [record.message for record in caplog.records]
    (warning,) = [text for text in told if "Too many open files" in text]
    (refusal,) = [text for text in told if text != warning]
    assert "ulimit -n" in warning
    assert "its descriptor is needed" in refusal  # The first caller has proved nothing by then.
    assert min(gaps_s) >= ACCEPT_PAUSE_S


def test_a_socket_is_not_closed_under_a_write() -> None:
    """Its descriptor would be some other file's by the time of the write."""
    with link_ranks(2) as (left, right):
        link = left._peers[1]
        with link.lock:
            right.close()
            with pytest.raises(PeerLostError):
                left.receive(1, tag(0), timeout_s=TIMEOUT_S)

            assert link.sock.fileno() >= 0
        wait_until(lambda: link.sock.fileno() < 0)


def test_a_mistake_in_the_serving_thread_reaches_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that dies in silence would leave all ranks waiting."""

    def mistake(*_: object) -> None:
        raise RuntimeError("a bug")

    with link_ranks(2) as (left, right):
        thread, errors = blocked_receive(left, 1)
        handlers = replace(left._server._handlers, on_message=mistake)
        monkeypatch.setattr(left._server, "_handlers", handlers)
        right.send(0, tag(0), payload(1))
        thread.join(TIMEOUT_S)

        assert isinstance(errors[0], AssertionError)
        assert "a bug" in str(errors[0].__cause__)
        with pytest.raises(AssertionError):
            left.send(1, tag(1), payload(1))
        with pytest.raises(PeerLostError):
            right.receive(0, tag(0), timeout_s=TIMEOUT_S)


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    """Also with links that are being made, and when called twice."""
    threads, descriptors = threading.active_count(), num_descriptors()
    with link_ranks(4) as ranks:
        stranger = socket.create_connection(ranks[0].address, timeout=TIMEOUT_S)
        for links in ranks:
            links.close()
            links.close()
        stranger.close()

    assert threads == threading.active_count()
    assert descriptors == num_descriptors()


def test_close_writes_out_what_the_kernel_takes() -> None:
    """A rank that leaves has said all that fits into the buffers; here that is all."""
    with link_ranks(2) as (left, right):
        link = left._peers[1]
        with link.lock:
            link._unsent.append(memoryview(connection.header(0, tag(0), 0)))
        left.close()

        assert right.receive(0, tag(0), timeout_s=TIMEOUT_S).size == 0


def test_close_frees_who_waits_and_a_late_send_is_harmless() -> None:
    """The reduction thread may still be at it when the worker leaves."""
    with link_ranks(2) as (left, _):
        thread, errors = blocked_receive(left, 1)
        link = left._peers[1]
        left.close()
        thread.join(TIMEOUT_S)
        left._peers[1] = link  # As a thread has it that looked just before.
        left.send(1, tag(0), payload(1, size=LARGE))

        assert isinstance(errors[0], AbortedError)
        del left._peers[1]
