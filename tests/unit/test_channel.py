"""Channels: whole messages in order, no descriptor leaked, each answer that is no message."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import channel
from headrace.channel import MAX_FDS, MAX_MESSAGE_NBYTES, Channel, socket_pair
from headrace.errors import (
    Closed,
    LocalProtocolError,
    PeerDied,
    Refused,
    RemoteProtocolError,
    WouldBlock,
)

Text = Channel[str, str]


def encode(message: str) -> bytes:
    return message.encode()


def decode(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"no text: {error}") from error


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def raw_and_text() -> Iterator[tuple[socket.socket, Text]]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, Channel(far, encode, decode) as end:
        yield near, end


@contextlib.contextmanager
def two_ends() -> Iterator[tuple[Text, Text]]:
    near, far = socket_pair(16, 1024)
    with Channel(near, encode, decode) as one, Channel(far, encode, decode) as other:
        yield one, other


def send_fds(sock: socket.socket, payload: bytes, fds: list[int]) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
    sock.sendmsg([payload], [rights])


def test_messages_keep_their_bounds_and_order_both_ways() -> None:
    with two_ends() as (one, other):
        for number in range(16):
            one.send(f"down {number}" * (number + 1))
            other.send(f"up {number}")
        for number in range(16):
            assert other.receive() == (f"down {number}" * (number + 1), [])
            assert one.receive() == (f"up {number}", [])
        for end in (one, other):
            with pytest.raises(WouldBlock):
                end.receive()


def test_the_longest_message_passes_and_one_byte_more_does_not() -> None:
    near, far = socket_pair(1, MAX_MESSAGE_NBYTES)
    with Channel(near, encode, decode) as one, Channel(far, encode, decode) as other:
        one.send("x" * MAX_MESSAGE_NBYTES)
        assert other.receive() == ("x" * MAX_MESSAGE_NBYTES, [])
        for size in (0, MAX_MESSAGE_NBYTES + 1):
            with pytest.raises(LocalProtocolError, match=f"this one {size}"):
                one.send("x" * size)
        with pytest.raises(WouldBlock):
            other.receive()


def test_descriptors_arrive_as_close_on_exec_duplicates() -> None:
    before = open_fds()
    with two_ends() as (one, other):
        reader, writer = os.pipe()
        one.send("pipe", [writer, reader])
        os.close(writer)
        os.close(reader)
        message, (far_writer, far_reader) = other.receive()
        assert message == "pipe"
        assert fcntl.fcntl(far_writer, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.write(far_writer, b"through")
        assert os.read(far_reader, 16) == b"through"
        os.close(far_writer)
        os.close(far_reader)
    assert open_fds() == before


def test_the_most_descriptors_pass_and_one_more_does_not() -> None:
    with two_ends() as (one, other):
        one.send("many", [0] * MAX_FDS)
        _, fds = other.receive()
        assert len(fds) == MAX_FDS
        for fd in fds:
            os.close(fd)
        with pytest.raises(LocalProtocolError, match=f"up to {MAX_FDS} descriptors, got"):
            one.send("more", [0] * (MAX_FDS + 1))


def test_a_descriptor_that_is_not_open_is_our_mistake() -> None:
    with two_ends() as (one, other):
        with pytest.raises(LocalProtocolError, match="Bad file descriptor"):
            one.send("lost", [2**20])
        with pytest.raises(WouldBlock):
            other.receive()


def test_a_full_queue_blocks_nobody() -> None:
    with two_ends() as (one, other):
        sent = 0
        with contextlib.suppress(WouldBlock):
            while True:
                one.send(f"{sent:1024}")
                sent += 1
        assert sent >= 16
        with pytest.raises(WouldBlock, match="no room to queue 1024 bytes"):
            one.send("x" * 1024)
        for number in range(sent):
            assert int(other.receive()[0]) == number
        one.send("again")
        assert other.receive() == ("again", [])


def test_the_end_of_the_stream_comes_after_every_message() -> None:
    with two_ends() as (one, other):
        one.send("first")
        one.send("last")
        one.close()
        assert other.receive()[0] == "first"
        assert other.receive()[0] == "last"
        for _ in range(2):
            with pytest.raises(PeerDied):
                other.receive()
        with pytest.raises(PeerDied):
            other.send("anyone?")


def test_a_peer_that_left_mail_unread_still_delivers_its_own() -> None:
    with two_ends() as (one, other):
        other.send("never read")
        one.send("final")
        one.close()
        # The kernel reports the reset before the message that is queued.
        assert other.receive()[0] == "final"
        with pytest.raises(PeerDied):
            other.receive()


def test_sending_into_a_reset_is_a_dead_peer() -> None:
    with two_ends() as (one, other):
        other.send("never read")
        one.close()
        for _ in range(2):
            with pytest.raises(PeerDied):
                other.send("more")
        with pytest.raises(PeerDied):
            other.receive()


def test_a_killed_peer_delivers_what_it_sent_and_then_ends() -> None:
    near, far = socket_pair(4, 64)
    script = (
        "import os, signal, socket, sys\n"
        "end = socket.socket(fileno=int(sys.argv[1]))\n"
        "end.send(b'one'); end.send(b'two')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with Channel(near, encode, decode) as end:
        with far:
            child = subprocess.Popen(
                [sys.executable, "-c", script, str(far.fileno())], pass_fds=[far.fileno()]
            )
        assert child.wait() == -signal.SIGKILL
        assert end.receive()[0] == "one"
        assert end.receive()[0] == "two"
        with pytest.raises(PeerDied):
            end.receive()


def test_an_oversized_packet_is_the_peers_fault_and_its_descriptors_are_closed() -> None:
    with raw_and_text() as (raw, end):
        before = open_fds()
        send_fds(raw, bytes(MAX_MESSAGE_NBYTES + 1), [0, 1])
        with pytest.raises(RemoteProtocolError, match="longer than"):
            end.receive()
        assert open_fds() == before
        raw.send(b"whole")
        assert end.receive() == ("whole", [])


def test_too_many_descriptors_are_the_peers_fault_and_are_closed() -> None:
    with raw_and_text() as (raw, end):
        before = open_fds()
        send_fds(raw, b"greedy", [0] * (MAX_FDS + 1))
        with pytest.raises(RemoteProtocolError, match=f"more than {MAX_FDS} sent"):
            end.receive()
        assert open_fds() == before


def test_an_undecodable_message_closes_its_descriptors() -> None:
    with raw_and_text() as (raw, end):
        before = open_fds()
        send_fds(raw, b"\xff\xfe", [0, 1, 2])
        with pytest.raises(RemoteProtocolError, match="no text"):
            end.receive()
        assert open_fds() == before


def test_an_empty_message_is_not_the_end() -> None:
    with raw_and_text() as (raw, end):
        before = open_fds()
        raw.send(b"")
        send_fds(raw, b"", [0])
        for _ in range(2):
            with pytest.raises(RemoteProtocolError, match="empty"):
                end.receive()
        assert open_fds() == before
        raw.close()
        with pytest.raises(PeerDied):
            end.receive()


def test_only_rights_count_as_descriptors() -> None:
    whole = array.array("i", [7, 8]).tobytes()
    ancillary = [
        (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, bytes(12)),
        (socket.SOL_SOCKET, socket.SCM_RIGHTS, whole + b"\x01"),
    ]
    assert channel._descriptors(ancillary) == [7, 8]


@given(st.binary(max_size=300), st.integers(0, MAX_FDS))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_a_message_or_the_peers_fault(payload: bytes, num_fds: int) -> None:
    before = open_fds()
    with raw_and_text() as (raw, end):
        send_fds(raw, payload, [0] * num_fds)
        try:
            message, fds = end.receive()
        except RemoteProtocolError:
            assert open_fds() == before + 2
        else:
            assert message.encode() == payload
            assert len(fds) == num_fds
            for fd in fds:
                os.close(fd)
    assert open_fds() == before


def test_wait_readable() -> None:
    with two_ends() as (one, other):
        assert not other.wait_readable(0.001)
        assert not other.wait_readable(-5.0)
        one.send("here")
        assert other.wait_readable(5.0)
        other.receive()
        one.close()
        assert other.wait_readable(5.0)


def test_fileno_works_in_a_selector() -> None:
    with two_ends() as (one, other):
        poll = select.poll()
        poll.register(other, select.POLLIN)
        assert poll.poll(0) == []
        one.send("here")
        assert poll.poll(0) == [(other.fileno(), select.POLLIN)]


def test_a_closed_channel_says_so() -> None:
    before = open_fds()
    near, far = socket_pair(1, 1)
    one, other = Channel(near, encode, decode), Channel(far, encode, decode)
    one.close()
    one.close()
    other.close()
    assert open_fds() == before
    with pytest.raises(Closed):
        one.send("x")
    with pytest.raises(Closed):
        one.receive()
    with pytest.raises(Closed):
        one.wait_readable(0)
    with pytest.raises(Closed):
        one.fileno()


def test_a_channel_dropped_open_warns() -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = Channel(near, encode, decode)
    ends = [end]
    del near, end
    with far, pytest.warns(ResourceWarning, match="unclosed <socket"):
        ends.clear()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_channel_needs_sequenced_packets(kind: socket.SocketKind) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, kind)
    with near, far, pytest.raises(LocalProtocolError, match="SOCK_SEQPACKET"):
        Channel(near, encode, decode)
    with socket.socket(socket.AF_INET) as inet, pytest.raises(LocalProtocolError):
        Channel(inet, encode, decode)


def test_an_end_that_came_by_exec_goes_no_further() -> None:
    near, far = socket_pair(1, 1)
    assert not near.get_inheritable()
    assert not far.get_inheritable()
    far.set_inheritable(True)
    with near, Channel(far, encode, decode) as end:
        assert not os.get_inheritable(end.fileno())
        assert not os.get_blocking(end.fileno())


@pytest.mark.parametrize(
    ("messages", "nbytes"), [(1, 1), (1, MAX_MESSAGE_NBYTES), (3000, 1), (500, 4096), (64, 33_000)]
)
def test_a_pair_queues_what_was_asked_for_each_way(messages: int, nbytes: int) -> None:
    try:
        near, far = socket_pair(messages, nbytes)
    except Refused as refusal:  # an ordinary user under the usual net.core.wmem_max
        pytest.skip(str(refusal))
    with Channel(near, encode, decode) as one, Channel(far, encode, decode) as other:
        for _ in range(messages):
            one.send("x" * nbytes)
            other.send("x" * nbytes)


def test_a_pair_needs_no_privilege(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_SO_SNDBUFFORCE", 9999)
    near, far = socket_pair(16, 1024)
    near.close()
    far.close()


def test_a_low_system_limit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(channel, "_SO_SNDBUFFORCE", 9999)
    with pytest.raises(Refused, match=r"net\.core\.wmem_max") as refusal:
        socket_pair(50_000, 4096)
    queued, messages, nbytes, limit, needed, wmem_max = map(
        int, re.findall(r"\b\d+\b", str(refusal.value))
    )
    assert (messages, nbytes) == (50_000, 4096)
    assert 0 < queued < messages
    assert limit < needed == wmem_max
    assert open_fds() == before


def test_a_pair_grows_when_packets_cost_more_than_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_PACKET_OVERHEAD_NBYTES", 0)
    near, far = socket_pair(150, 1)
    with near, far:
        assert channel._fill(near, 150, b"x") == 150


def test_a_buffer_below_one_packet_queues_none() -> None:
    near, far = channel._sized_pair(1)
    with near, far:
        assert channel._fill(near, 3, bytes(MAX_MESSAGE_NBYTES)) == 0
        with (
            Channel(near, encode, decode) as end,
            pytest.raises(LocalProtocolError, match="Message too long"),
        ):
            end.send("x" * MAX_MESSAGE_NBYTES)


def test_another_failure_while_trying_out_is_not_taken_for_a_full_queue() -> None:
    near, far = channel._sized_pair(4096)
    far.close()
    with near, pytest.raises(OSError, match="Broken pipe") as failure:
        channel._fill(near, 1, b"x")
    assert failure.value.errno == errno.EPIPE


def test_a_pair_beyond_any_buffer_is_refused_before_it_is_tried() -> None:
    with pytest.raises(Refused, match="Announce in larger spans"):
        socket_pair(10**9, 1)


@pytest.mark.parametrize(("messages", "nbytes"), [(0, 1), (1, 0), (1, MAX_MESSAGE_NBYTES + 1)])
def test_a_pair_for_no_message_is_our_mistake(messages: int, nbytes: int) -> None:
    with pytest.raises(LocalProtocolError, match="cannot queue"):
        socket_pair(messages, nbytes)


def test_what_a_channel_counts() -> None:
    with raw_and_text() as (near, end):
        end.send("four")
        near.send(b"one")
        near.send(b"\xff")
        assert end.receive()[0] == "one"
        with pytest.raises(RemoteProtocolError):
            end.receive()
        with pytest.raises(WouldBlock):
            end.receive()
        with contextlib.suppress(WouldBlock):
            while True:
                end.send("x" * 1000)
        counts = end.statistics()
        assert counts["sent_nbytes"] == 4 + 1000 * (counts["sent"] - 1)
        del counts["sent"], counts["sent_nbytes"]
        assert counts == {"no_room": 1, "received": 1, "refused": 1, "open": 1}
    assert end.statistics()["open"] == 0
