"""What is odd in a config and may be meant: one sentence each, and no reason not to serve."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.backends.load import DECODERS
from headrace.plan import TOKEN_NBYTES
from headrace.runtime.pairs import NULL
from headrace.server.config import DecoderTable, ServeConfig
from headrace.server.hosts import is_loopback
from headrace.server.owner_configs import KEEP_NOTHING, kept_nbytes
from headrace.server.queue import CHOICE_NBYTES


def warnings_of(config: ServeConfig, lanes: Sequence[int]) -> list[str]:
    """What is odd in a config that can be served, one sentence each.

    lanes: how many each decoder is made with.
    """
    found = []
    threads = sum(
        table.threads + sum(each.threads for each in table.sources) for table in config.decoders
    )
    cores = len(os.sched_getaffinity(0))
    if threads > cores:
        found.append(
            f"decoders and sources have {threads} threads in all and this host gives {cores} "
            "cores: they slow each other down"
        )
    found += _queue_warnings(config)
    found += _context_warnings(config.decoders)
    for index, (table, count) in enumerate(zip(config.decoders, lanes, strict=True)):
        found += _decoder_warnings(f"decoders[{index}]", table, count, config)
    if config.http.allow_open and not is_loopback(config.http.host):
        found.append(f"http.host is {config.http.host} and anybody may use it")
    return found


def _queue_warnings(config: ServeConfig) -> Iterator[str]:
    """What the queue is too small for even when nothing waits."""
    queue, choices = config.queue, config.requests.max_choices
    if queue.max_requests < choices:
        yield (
            f"queue.max_requests is {queue.max_requests} and requests.max_choices is {choices}: "
            f"a request of more than {queue.max_requests} choices is answered 413"
        )
    for index, table in enumerate(config.decoders):
        nbytes = CHOICE_NBYTES + TOKEN_NBYTES * table.context
        if queue.max_bytes < nbytes:
            longest = (queue.max_bytes - CHOICE_NBYTES) // TOKEN_NBYTES
            yield (
                f"queue.max_bytes is {queue.max_bytes} and decoders[{index}].context is "
                f"{table.context}: a prompt of more than {longest} tokens is answered 413"
            )


def _context_warnings(tables: Sequence[DecoderTable]) -> Iterator[str]:
    """Where one name stands for decoders of different contexts: the smallest is that of all."""
    serving: dict[str, list[int]] = {}
    for index, table in enumerate(tables):
        for name in table.served_as or (table.model,):
            serving.setdefault(name, []).append(index)
    for name, found in serving.items():
        least = min(found, key=lambda index: tables[index].context)
        most = max(found, key=lambda index: tables[index].context)
        if tables[least].context < tables[most].context:
            yield (
                f"decoders[{most}].context is {tables[most].context} and decoders[{least}].context "
                f"is {tables[least].context}, and both are served as {name}: a request has to fit "
                "the smallest"
            )


def _decoder_warnings(
    place: str, table: DecoderTable, lanes: int, config: ServeConfig
) -> Iterator[str]:
    if table.decoder == NULL:
        yield (
            f"{place}.decoder is null, which decodes nothing: only requests of max_tokens 1 are "
            "served"
        )
    if table.decode_batch > lanes:
        yield (
            f"{place}.decode_batch is {table.decode_batch} and it has {many(lanes, 'lane')}: no "
            "more are decoded at once"
        )
    kept_by_sources = any(each.options.get("own_cache_nbytes") for each in table.sources)
    known = table.decoder in DECODERS and not kept_by_sources
    if config.requests.prefix != "off" and known and not kept_nbytes(table):
        keeps = "keeps no prompts" if table.decoder in KEEP_NOTHING else "has no keep_bytes"
        yield f"requests.prefix is {config.requests.prefix} and {place} {keeps}: it has no effect"
    if table.control is not None and _listens(Path(table.control)):
        yield (
            f"{place}.control: an owner listens at {table.control}, and another one cannot: end it "
            "first"
        )


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError as exc:
            return exc.errno == errno.EAGAIN  # its queue is full
        return True


def many(count: int, word: str) -> str:
    """A count with its word, which has an s where it is not one."""
    return f"{count} {word}{'' if count == 1 else 's'}"
