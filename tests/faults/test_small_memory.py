"""Too little of anything: one clear sentence, an exit status, and nothing left behind.

A process is given its limits by a shell that becomes it. A limit so small that the interpreter
itself cannot start is not tried here: nobody of ours could say anything.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.backends.null import NullDecoder, decoder_like
from headrace.backends.replay import open as open_replay
from headrace.engine.capacity import available_nbytes
from headrace.errors import HeadraceError, Refused
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from headrace.runtime.worker import SourceHandle
from tests.faults.stage import marked

GEOMETRY = {"layers": 4, "heads": 2, "head_dim": 64}
POSITION_NBYTES = 4 * 2 * 2 * 64 * 2
CONTEXT = 24_576
SOURCES = (SourceConfig("replay", GEOMETRY),)
SLAB_MIB = 2 * CONTEXT * POSITION_NBYTES >> 20
REPLAY = ["run", "--source", "replay", "--decoder", "null", "--prompt", "abc", "--max-tokens", "0"]
ASKED = RequestOptions(route="streamed", max_tokens=0)
TOKENS = [1] * 512
SIGNALS = ("status -", "signal")


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with marked(tmp_path, monkeypatch):
        yield


def limited(directory: Path, *limits: str) -> str:
    """An interpreter with limits, each an option of ulimit and its value."""
    path = directory / "python"
    lines = [f"ulimit {limit}" for limit in limits]
    path.write_text("\n".join(["#!/bin/sh", "set -e", *lines, f'exec {sys.executable} "$@"', ""]))
    path.chmod(0o755)
    return str(path)


def sentence(error: BaseException | str) -> str:
    """The text of an error, which is one line, names no signal and is no traceback."""
    text = str(error)
    assert text
    assert "\n" not in text.rstrip("\n")
    assert "Traceback" not in text
    assert not any(word in text for word in SIGNALS)
    return text


def served_by_source(interpreter: str) -> str:
    """How an attempt ends whose source runs under limits: `finished` or a sentence."""
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    owner = DecoderOwner(NullDecoder(manifest, context=CONTEXT, lanes=1), context=CONTEXT)
    handle = SourceHandle("replay", GEOMETRY, interpreter=interpreter)
    try:
        handle.start()
        owner.attach(handle)
        request = owner.submit(TOKENS, ASKED)
        owner.run_until_done(request)
        return request.outcome if not request.reason else sentence(request.reason)
    except HeadraceError as exc:
        return sentence(exc)
    finally:
        handle.close()
        owner.check_integrity()
        owner.close()


def served_by_owner(monkeypatch: pytest.MonkeyPatch, interpreter: str) -> str:
    """The same for an owner under limits, which its source inherits."""
    lanes = {"context": CONTEXT, "lanes": 1}
    client = OwnerClient(OwnerConfig("null", lanes, SOURCES, CONTEXT))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", interpreter)
        try:
            client.start()
            ended = client.result(client.submit(TOKENS, ASKED)).ended
            return ended.outcome if not ended.reason else sentence(ended.reason)
        except HeadraceError as exc:
            return sentence(exc)
        finally:
            client.close()


@pytest.mark.parametrize("mib", [40, SLAB_MIB, 2 * SLAB_MIB + 100])
def test_a_source_in_little_address_space(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mib: int
) -> None:
    ended = served_by_source(limited(tmp_path, f"-v {mib << 10}"))
    if mib > 2 * SLAB_MIB:
        assert ended == "finished"
    else:
        assert "cannot map a slab" in ended
        assert "ulimit -v" in ended
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("mib", [40, 60, 80, 100, 140, 4096])
def test_an_owner_in_little_address_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], mib: int
) -> None:
    """First its lanes do not fit, then its slab, or its source's."""
    ended = served_by_owner(monkeypatch, limited(tmp_path, f"-v {mib << 10}"))
    wanted = ("finished",) if mib == 4096 else ("of host memory cannot be had", "map a slab")
    assert any(text in ended for text in wanted), ended
    assert capfd.readouterr().err == ""


def test_an_owner_in_little_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private memory alone is limited: lanes do not fit."""
    ended = served_by_owner(monkeypatch, limited(tmp_path, f"-d {40 << 10}"))
    assert "of host memory cannot be had" in ended


@pytest.mark.parametrize("descriptors", range(6, 14))
def test_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: int) -> None:
    """Nine do for an owner, six for a source."""
    interpreter = limited(tmp_path, f"-n {descriptors}")
    assert served_by_source(interpreter) == "finished"
    ended = served_by_owner(monkeypatch, interpreter)
    assert ended == "finished" or "ulimit -n" in ended


@pytest.mark.parametrize("blocks", [0, 8])
def test_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """A slab is a file to the kernel; a source that maps it needs no such room."""
    interpreter = limited(tmp_path, f"-f {blocks}")
    assert served_by_source(interpreter) == "finished"
    assert "ulimit -f" in served_by_owner(monkeypatch, interpreter)


def test_no_process_may_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root is not bound by `ulimit -u`, so the kernel's answer is given for it."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    client = OwnerClient(OwnerConfig("null", {}, SOURCES, CONTEXT))
    with pytest.raises(Refused, match="ulimit -u"):
        client.start()
    client.close()
    handle = SourceHandle("replay", GEOMETRY)
    with pytest.raises(Refused, match="ulimit -u"):
        handle.start()
    handle.close()


def test_a_slab_larger_than_memory(tmp_path: Path) -> None:
    """Refused before a byte of it is taken, by the owner that would make it."""
    slots = available_nbytes() // (CONTEXT * POSITION_NBYTES) + 1
    assert "bytes available" in refused(tmp_path, "--slots", str(slots))


def test_a_pool_that_never_fits_is_refused_by_its_owner() -> None:
    manifest = decoder_like(open_replay(GEOMETRY).manifest())
    owner = DecoderOwner(NullDecoder(manifest, context=8, lanes=1), context=1 << 19)
    handle = SourceHandle("replay", GEOMETRY, num_slots=1 << 20)
    try:
        handle.start()
        with pytest.raises(Refused, match="bytes available"):
            owner.attach(handle)
        owner.check_integrity()
    finally:
        handle.close()
        owner.close()


@pytest.mark.parametrize(
    ("limit", "words"),
    [(f"-v {400 << 10}", "ulimit -v"), ("-n 7", "ulimit -n"), ("-f 8", "ulimit -f")],
)
def test_a_command_under_limits(tmp_path: Path, limit: str, words: str) -> None:
    """All three processes are under them."""
    assert words in refused(tmp_path, "--slots", "8", limit=limit)


def refused(directory: Path, *more: str, limit: str = "-c 0") -> str:
    """What a command that is refused says: one sentence, on stderr alone."""
    options = ["--source-options", json.dumps(GEOMETRY), "--lanes", "1", "--context", str(CONTEXT)]
    done = subprocess.run(
        [limited(directory, limit), "-m", "headrace", *REPLAY, *options, *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    return sentence(done.stderr)


@pytest.mark.parametrize("mib", [50, 90, 130, 170, 210, 250])
def test_a_command_that_decodes_in_little_address_space(tmp_path: Path, mib: int) -> None:
    """Where other people's libraries are loaded; what they say is theirs, but none is a crash."""
    done = subprocess.run(
        [limited(tmp_path, f"-v {mib << 10}"), "-m", "headrace", *REPLAY[:-1], "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1, 2, 130), done.stderr  # 130: OpenBLAS interrupts who loads it
    assert "Traceback" not in done.stderr
