"""The process of an ATOM owner on a fake card is killed: its source goes with it, all is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from headrace.backends import atom
from headrace.errors import PeerDied
from headrace.runtime.config import OwnerConfig, SourceConfig
from headrace.runtime.requests import RequestOptions
from headrace.runtime.router import OwnerClient
from headrace.testing.atom_records import OPEN, recorded
from headrace.testing.fake_rebellions import compile_fake
from headrace.testing.pair import imitation
from tests.e2e.families import directory_of, make_prompt
from tests.faults.test_owner_process import children_of, dead

CONTEXT = 64
LAYER_MS = 100.0


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OwnerConfig:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    model, compiled = directory_of("llama"), tmp_path / "compiled"
    compile_fake(model, compiled, max_seq_len=CONTEXT)
    recorded(compiled)
    options = {"model": str(model), "compiled": str(compiled), "sdk": OPEN}
    decoder = atom.open(options)
    manifest = replace(decoder.manifest(), layouts=("head_major",))
    decoder.close()
    source = {"decoder": msgspec.to_builtins(manifest), "layer_ms": LAYER_MS}
    return OwnerConfig("atom", options, (SourceConfig(imitation.FACTORY, source),), CONTEXT)


def test_killed_while_it_decodes_and_another_is_prefilled(config: OwnerConfig) -> None:
    """Once the first request has decoded a token, the next one is in its prefill."""
    client = OwnerClient(config)
    try:
        assert client.start().lanes == 1
        owner = client.pid
        (source,) = children_of(owner)
        pidfd = os.pidfd_open(source)
        asked = RequestOptions(route="streamed", max_tokens=CONTEXT - 20)
        first, second = (client.submit(make_prompt(20, seed), asked) for seed in range(2))
        decoded: list[int] = []

        def kill(token: int) -> bool:
            if not decoded:
                os.kill(owner, signal.SIGKILL)
            decoded.append(token)
            return False

        died = pytest.raises(PeerDied, match=r"the owner process died \(status -9\)")
        with died:
            client.result(first, kill)
        with died:
            client.result(second)
        assert 0 < len(decoded) < CONTEXT - 20
        assert dead(pidfd)
        os.close(pidfd)
    finally:
        client.close()
