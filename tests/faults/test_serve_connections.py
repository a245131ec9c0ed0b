"""A real server and clients that keep connections, flood it, talk nonsense or leave early."""

from __future__ import annotations

import http.client
import json
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.conftest import children, open_fds
from tests.served import QUICK, WITHIN_S, Served, Steps, decoder_table, model_directory

FEW = "[http]\nport = 0\nmax_connections = 12\nkeep_alive_s = 1\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
FEW_FILES = """\
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 523))
os.execv(sys.executable, [sys.executable, "-m", "headrace", *sys.argv[1:]])
"""
FLOOD = """\
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(120)]
for sock in held[::2]:
    try:
        sock.sendall(b"GET /health HTTP")
    except ConnectionError:
        pass
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No child and no descriptor is left; `Served` looks for what the server leaves."""
    before = children(), open_fds()
    yield
    assert (children(), open_fds()) == before


def connect(served: Served, sent: bytes = b"") -> socket.socket:
    address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
    sock = socket.create_connection(address, timeout=WITHIN_S)
    sock.sendall(sent)
    return sock


def completion(**more: object) -> bytes:
    body = json.dumps({"model": "letters", "prompt": "hi", "max_tokens": 8, **more}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def all_of(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    told = b""
    with suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            told += piece
    return told


def nothing_complained(served: Served) -> None:
    complaints = [
        line for line in served.lines if re.search(r"(?i)error|warning|traceback|exception", line)
    ]
    assert not complaints


@contextmanager
def few_files() -> Iterator[None]:
    """What is started here may have 64 files open, unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_flood_of_connections_ends_and_the_server_serves_on(tmp_path: Path) -> None:
    """Ten times the limit, each saying nothing, or half a head; then those that are kept alive."""
    with few_files():
        starting = Served(tmp_path, decoder_table(), FEW)
    with starting as served:
        files = Path(f"/proc/{served.pid}/fd")
        before = len(list(files.iterdir()))
        flood = subprocess.Popen(
            [sys.executable, "-c", FLOOD, served.url.rpartition(":")[2]], stdin=subprocess.PIPE
        )
        with flood:
            served.wait_for("too-many-connections 503", 30)
            flood.communicate()
        served.until(lambda: len(list(files.iterdir())) <= before, "all are closed")
        with ExitStack() as held:
            kept = [held.enter_context(connect(served, HEALTH)) for _ in range(12)]
            assert all(sock.recv(64).startswith(b"HTTP/1.1 200") for sock in kept)
            assert served.complete().status_code == 503
            for sock in kept:
                all_of(sock)
            assert served.complete().json()["choices"][0]["text"] == "EFGHIJKL"
        nothing_complained(served)


def test_too_few_open_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model_directory(tmp_path / "model")
    config = tmp_path / "headrace.toml"
    table = decoder_table().replace("MODEL_DIRECTORY", str(tmp_path / "model"))
    config.write_text(table + FEW)
    run = [sys.executable, "-c", FEW_FILES, "serve", f"--config={config}"]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "12 connections need 524 open files" in line
    assert "set `ulimit -n` to 524" in line


def test_a_client_that_leaves_ends_its_request_also_with_another_one_sent(
    tmp_path: Path, steps: Steps
) -> None:
    with Served(tmp_path, decoder_table(steps=str(steps.path)), QUICK) as served:
        for number, more in enumerate((b"", completion()), 1):
            with connect(served, completion(stream=True) + more) as sock:
                assert sock.recv(64).startswith(b"HTTP/1.1 200")
            served.wait_for(f"request {number}: client-left 499")
            steps.allow(2)  # that of the first may have begun; the next one's token needs another
        steps.open()
        assert served.complete().json()["choices"][0]["text"] == "EFGHIJKL"


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(tmp_path / "steps")
    made.allow(1)  # the first token is told after the first step
    yield made
    made.open()


NO_HTTP = [
    b"\x16\x03\x01\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n",
    completion().replace(b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: ") + b"\r\n",
]


def test_what_is_no_http_and_what_wants_another_protocol_is_answered(tmp_path: Path) -> None:
    """With the error object of all errors, an id, and a count; nothing is complained of."""
    with Served(tmp_path, decoder_table()) as served:
        for sent in NO_HTTP:
            with connect(served, sent) as sock:
                head, _, body = all_of(sock).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
                assert b"\r\nx-request-id: " in head
                assert json.loads(body)["error"]["code"] == "invalid"
        upgrade = b"Connection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
        with connect(served, HEALTH[:-2] + upgrade) as sock:
            assert all_of(sock).startswith(b"HTTP/1.1 200")
        counted = 'endpoint="other",status="400",terminal="invalid"} 4.0'
        assert counted in httpx.get(f"{served.url}/metrics").text
        nothing_complained(served)


def test_a_body_that_is_too_large_is_told_so_while_it_is_still_sent(tmp_path: Path) -> None:
    """A client that writes all of it before it reads must find the answer, and no reset."""
    table = "[http]\nport = 0\nmax_body_bytes = 1024\n"
    with Served(tmp_path, decoder_table(), table) as served:
        port = int(served.url.rpartition(":")[2])
        for headers in ({}, {"Connection": "close"}) * 2:
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
            with closing(client):
                client.request("POST", "/v1/completions", b"x" * (2 << 20), headers)
                told = client.getresponse()
                assert told.status == 413
                assert json.loads(told.read())["error"]["code"] == "too-large"
        nothing_complained(served)
