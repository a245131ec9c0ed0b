"""Requests that are none: a generated table of raw bytes, and mutations of good bodies by seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Final, NamedTuple

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
TOKENIZE: Final = "/tokenize"
_HUGE: Final = "9" * 400


class Nonsense(NamedTuple):
    """A request as it is sent; whole: whether an answer may be waited for with the sending side
    open, since nothing more of the request is to come.
    """

    name: str
    raw: bytes
    whole: bool


def request(
    body: bytes,
    path: str = COMPLETIONS,
    *,
    method: str = "POST",
    length: str | None = None,
    more: Sequence[str] = (),
) -> bytes:
    """A request with the length that its body has, or the one that is given."""
    length = str(len(body)) if length is None else length
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {length}"] if length else []
    return "\r\n".join([*head, *more, "", ""]).encode("latin-1") + body


def good_bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Small good requests by path, as a start for mutations."""
    asked = {"model": model, "max_tokens": 2, "temperature": 0}
    said = [{"role": "user", "content": "Hello."}]
    return [
        (COMPLETIONS, {**asked, "prompt": "Hello.", "seed": 1, "stop": ["\n\n"]}),
        (COMPLETIONS, {**asked, "prompt": [5, 6, 7], "stream": True, "n": 2, "logprobs": 1}),
        (CHAT, {**asked, "messages": said, "stream": True, "stream_options": {}}),
        (CHAT, {**asked, "messages": said, "logprobs": True, "top_logprobs": 2, "top_p": 0.5}),
        (TOKENIZE, {"model": model, "prompt": "Hello."}),
    ]


def table(model: str, count: int) -> list[Nonsense]:
    """The first `count`, one of each kind by turns."""
    kinds = (_cut(model), _typed(model), _shaped(model), _framed(model), _headed(model), _lined())
    turns = chain.from_iterable(zip_longest(*kinds))
    return [each for each in turns if each is not None][:count]


def _cut(model: str) -> Iterator[Nonsense]:
    """JSON that ends early, with the length that it has, and with that of the whole."""
    for path, body in good_bodies(model):
        text = json.dumps(body).encode()
        for eighth in range(8):
            piece = text[: len(text) * eighth // 8]
            yield Nonsense(f"cut at {eighth}/8 {path}", request(piece, path), True)
        half, whole = text[: len(text) // 2], str(len(text))
        yield Nonsense(f"half sent {path}", request(half, path, length=whole), False)


def _typed(model: str) -> Iterator[Nonsense]:
    """Values of the wrong type or size in each field."""
    odd: tuple[Any, ...] = (None, True, -1, 1e308, 10**30, "", "x", [], {}, [[]], [None], [{}])
    draw = random.Random(0)
    for path, body in good_bodies(model):
        for field in body:
            for value in draw.sample(odd, 3):
                raw = json.dumps({**body, field: value}).encode()
                yield Nonsense(f"{field} is {value!r} {path}", request(raw, path), True)
    first = json.dumps(good_bodies(model)[0][1])
    for field in ("max_tokens", "temperature", "seed"):
        for value in (_HUGE, f"-{_HUGE}", "1e999", "NaN", "Infinity", "0x10", "01"):
            raw = (first[:-1] + f', "{field}": {value}}}').encode()
            yield Nonsense(f"{field} is {value[:12]}", request(raw), True)


def _shaped(model: str) -> Iterator[Nonsense]:
    """Bodies that are no object, nest deeply, or are no UTF-8."""
    for raw in (b"", b"null", b"[]", b"0", b'"x"', b"{", b"}", b"{}{}", b"\x00", b"\xff\xfe{\x00"):
        yield Nonsense(f"the body is {raw!r}", request(raw), True)
    for depth in (100, 1000, 100_000):
        for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
            inside = opened * depth + b"1" + closed * depth
            yield Nonsense(f"{depth} deep", request(inside), True)
            held = b'{"model":"x","prompt":' + inside + b"}"
            yield Nonsense(f"a prompt {depth} deep", request(held), True)
    for bad in (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\\ud800", b"\\x"):
        raw = b'{"model":"' + model.encode() + b'","max_tokens":1,"prompt":"' + bad + b'"}'
        yield Nonsense(f"a prompt of {bad!r}", request(raw), True)
    many = json.dumps({"model": model, "prompt": [1] * 100_000, "max_tokens": 1}).encode()
    yield Nonsense("a prompt of 100,000 ids", request(many), True)
    twice = b'{"model":"a","model":"b","prompt":"x"}'
    yield Nonsense("a key twice", request(twice), True)


def _framed(model: str) -> Iterator[Nonsense]:
    """Lengths and chunks that are wrong."""
    body = json.dumps(good_bodies(model)[0][1]).encode()
    for length in ("-1", "abc", "1e3", "0x10", "99999999999999999999", "1, 2", " ", "+5"):
        yield Nonsense(f"length {length}", request(body, length=length), False)
    yield Nonsense("two lengths", request(body, more=["Content-Length: 3"]), False)
    yield Nonsense("too short a length", request(body, length="10"), False)
    yield Nonsense("no length", request(body, length=""), False)
    chunked = ["Transfer-Encoding: chunked"]
    for raw in (
        b"zz\r\nabc\r\n0\r\n\r\n",
        b"-1\r\nabc\r\n",
        b"ffffffffffffffff\r\nabc",
        b"5\r\nabc",
        b"3;" + b"x" * 70_000 + b"\r\nabc\r\n0\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"0\r\n\r\n",
        b"3\r\nabcdef\r\n0\r\n\r\n",
        bytes(range(256)),
    ):
        text = f"chunked {raw[:16]!r}"
        yield Nonsense(text, request(raw, length="", more=chunked), False)
    both = [*chunked]
    yield Nonsense("chunked with a length", request(b"0\r\n\r\n", length="5", more=both), False)
    for coding in ("gzip", "chunked, chunked", "identity", "nonsense"):
        more = [f"Transfer-Encoding: {coding}"]
        yield Nonsense(f"coding {coding}", request(body, length="", more=more), False)


def _headed(model: str) -> Iterator[Nonsense]:
    """Headers that are too many, too long, or none."""
    body = json.dumps(good_bodies(model)[0][1]).encode()
    floods = {
        "1,000 headers": [f"X-{at}: {at}" for at in range(1000)],
        "a header of 100,000 bytes": ["X-Long: " + "x" * 100_000],
        "a header of 40,000 bytes": ["X-Long: " + "x" * 40_000],
        "no colon": ["nonsense"],
        "an empty name": [": x"],
        "a folded line": ["X-A: 1", " folded"],
        "a NUL": ["X-A: \x00"],
        "a bare CR": ["X-A: a\rb"],
        "Latin-1": ["X-A: \xe9\xff"],
        "two hosts": ["Host: other"],
        "Expect": ["Expect: 100-continue"],
        "an unknown Expect": ["Expect: nonsense"],
        "Upgrade": ["Connection: Upgrade", "Upgrade: websocket"],
        "h2c": ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"],
        "an odd key": ["Authorization: Bearer \xff"],
        "an odd label": ["X-Request-Id: " + "\t" * 10],
        "an odd parent": ["traceparent: 00-" + "0" * 32 + "-" + "0" * 16 + "-00"],
        "an unknown route": ["X-Headrace-Route: sideways"],
        "an odd deadline": ["X-Headrace-Deadline: NaN"],
        "a deadline below 0": ["X-Headrace-Deadline: -1"],
    }
    for name, more in floods.items():
        yield Nonsense(name, request(body, more=more), name != "h2c")


def _lined() -> Iterator[Nonsense]:
    """Methods, paths, versions, and bytes that are no HTTP."""
    for method in (
        "GET",
        "PUT",
        "DELETE",
        "TRACE",
        "CONNECT",
        "OPTIONS",
        "post",
        "M" * 5000,
        "\xff",
    ):
        yield Nonsense(f"method {method[:12]}", request(b"", method=method), True)
    for path in (
        "/../../etc/passwd",
        "//v1/completions",
        "/v1/completions/",
        "/v1/completions?x=%00",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/../../etc/passwd",
        "/v1/models/%2e%2e%2fetc%2fpasswd",
        "/v1/%63ompletions",
        "/trace/1e9",
        "/trace/-1",
        "/trace/" + "9" * 5000,
        "/" + "a" * 70_000,
        "/\xff\xfe",
        "*",
        "http://elsewhere/v1/models",
        "",
    ):
        yield Nonsense(f"path {path[:40]!r}", request(b"", path, method="GET"), True)
    for raw in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes(1000),
        bytes(range(256)) * 300,
        b"POST " + COMPLETIONS.encode() + b" HTTP/1.1\r\nHost: x\r\n",
    ):
        yield Nonsense(f"raw {raw[:20]!r}", raw, False)


def mutated(model: str, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` bodies with their paths, each a good one with one to three mutations."""
    draw = random.Random(seed)
    good = good_bodies(model)
    for _ in range(count):
        path, body = draw.choice(good)
        body = copy.deepcopy(body)
        for _ in range(draw.randrange(3)):
            _odd_leaf(body, draw)
        raw = bytearray(
            json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "replace")
        )
        for _ in range(draw.randrange(3)):
            _odd_bytes(raw, draw)
        yield path, bytes(raw)


_LEAVES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, 1e-308, 0.5, 3),
    *("", " ", "x" * 3000, "\x00", "\ud800", "\U0001f600", "null", "true", "whole", "auto"),
    *([], [[]], [0], [-1], ["a", 1], [""], {}, {"a": 1}, {"role": "user"}),
)


def _odd_leaf(body: dict[str, Any], draw: random.Random) -> None:
    """Put something odd in the place of a value, drop a key, or add one."""
    keys = [*body, "n", "stop", "route", "deadline_s", "user", "unknown", "best_of", "top_k"]
    key = draw.choice(keys)
    if key in body and draw.random() < 0.2:
        del body[key]
        return
    inner = body.get(key)
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and draw.random() < 0.5:
        inner[0][draw.choice(["role", "content", "name"])] = draw.choice(_LEAVES)
    else:
        body[key] = draw.choice(_LEAVES)


def _odd_bytes(raw: bytearray, draw: random.Random) -> None:
    """Change, cut, repeat or insert some bytes."""
    at = draw.randrange(len(raw) + 1)
    stop = min(len(raw), at + draw.randrange(1, 9))
    match draw.randrange(5):
        case 0:
            raw[at:stop] = bytes(draw.randrange(256) for _ in range(stop - at))
        case 1:
            del raw[at:stop]
        case 2:
            raw[at:at] = raw[at:stop] * draw.randrange(1, 20)
        case 3:
            raw[at:at] = draw.choice(
                (b"[", b"{", b'"', b",", b"1e999", b"\\u0000", b"\xff", b"9" * 99)
            )
        case _:
            del raw[at:]


def kinds_of(counts: Mapping[str, int]) -> str:
    """Counts in words, the most frequent first."""
    ordered = sorted(counts.items(), key=lambda each: -each[1])
    return ", ".join(f"{count} x {kind}" for kind, count in ordered)
