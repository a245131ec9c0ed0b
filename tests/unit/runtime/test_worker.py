"""The handle of a source: what its handshake refuses, and in which words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace.backends.null import decoder_like
from headrace.errors import Closed, PeerDied, Refused, RemoteProtocolError, WouldBlock
from headrace.geometry import Full, Manifest, Sliding
from headrace.ids import AttemptId
from headrace.messages import Cancel, Incompatible
from headrace.plan import slot_layout
from headrace.runtime.worker import SourceHandle, close_together
from headrace.testing.sinks import ask

pytestmark = pytest.mark.usefixtures("nothing_left")

GEOMETRY: dict[str, Any] = {"layers": 3, "heads": 2, "head_dim": 8, "window": 16, "full_every": 3}
CONTEXT = 64


@contextmanager
def started(engine: str = "replay", options: Any = None, **changes: Any) -> Iterator[SourceHandle]:
    options = GEOMETRY if options is None else options
    handle = SourceHandle(engine, options, **{"start_timeout_s": 20.0} | changes)
    handle.start()
    try:
        yield handle
    finally:
        handle.close()


def with_layer(manifest: Manifest, index: int, **changes: Any) -> Manifest:
    layers = list(manifest.layers)
    layers[index] = replace(layers[index], **changes)
    return replace(manifest, layers=tuple(layers))


def with_part(manifest: Manifest, **changes: Any) -> Manifest:
    key, value = manifest.layers[0].parts
    return with_layer(manifest, 0, parts=(replace(key, **changes), value))


def test_attach_and_close() -> None:
    with started() as handle:
        assert handle.manifest.role == "source"
        handle.attach(decoder_like(handle.manifest), CONTEXT, epoch=7)
        assert handle.layout == "head_major"
        assert len(handle.slot(0)) == len(handle.slot(1)) == handle.slot_nbytes
        assert handle.slot_address(1) - handle.slot_address(0) == handle.slot_nbytes
        assert bytes(handle.slot(1)[:16]) == bytes(16)
        with pytest.raises(WouldBlock):
            handle.receive()
        handle.send(Cancel(AttemptId(7, 0, 1)))  # of an attempt it never had: ignored
        assert not handle.died()
        handle.close()
        assert handle.died()
        with pytest.raises(Closed):
            handle.send(Cancel(AttemptId(7, 0, 1)))


MISMATCHES: dict[str, Any] = {
    "model": lambda m: replace(m, model="another"),
    "vocab_size": lambda m: replace(m, vocab_size=33),
    "logits_dtype": lambda m: replace(m, logits_dtype="float64"),
    "byte_order": lambda m: replace(m, byte_order="big"),
    "protocol": lambda m: replace(m, protocol=99),
    "number of layers": lambda m: replace(m, layers=m.layers[:2]),
    "layouts": lambda m: replace(m, layouts=("token_major",)),
    "emits": lambda m: replace(m, emits=()),
    "layers[other]": lambda m: with_layer(m, 1, name="other"),
    "layers[layers.0].kind": lambda m: with_layer(m, 0, kind=Full()),
    "layers[layers.0].window": lambda m: with_layer(m, 0, kind=Sliding(15, 15)),
    "layers[layers.0].k.heads": lambda m: with_part(m, heads=4),
    "layers[layers.0].k.head_dim": lambda m: with_part(m, head_dim=16),
    "layers[layers.0].k.dtype": lambda m: with_part(m, dtype="bfloat16"),
    "layers[layers.0].parts": lambda m: with_part(m, name="key"),
    "layers[layers.1].index": lambda m: replace(
        m, layers=(m.layers[0], replace(m.layers[2], index=1), replace(m.layers[1], index=2))
    ),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[SourceHandle]:
    with started() as handle:
        yield handle


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_mismatch_is_refused_by_its_field(shared: SourceHandle, field: str) -> None:
    """Before any memory is made: the source is not even told."""
    decoder = MISMATCHES[field](decoder_like(shared.manifest))
    with pytest.raises(Refused) as caught:
        shared.attach(decoder, CONTEXT, epoch=7)
    assert caught.value.field in (field, "layers[layers.2].index")
    assert field.split("[")[0].split(".")[-1] in str(caught.value) or "layer" in str(caught.value)
    with pytest.raises(Closed, match="no slab"):
        shared.slot(0)


def test_a_source_that_keeps_too_few_rows() -> None:
    """W - 1 rows where the decoder needs W."""
    with started("tests.unit.runtime.engines:open_short_tail") as handle:
        decoder = decoder_like(handle.manifest)
        decoder = with_layer(decoder, 0, kind=Sliding(16, 16))
        with pytest.raises(Refused, match="source emits 15 rows, decoder needs 16") as caught:
            handle.attach(decoder, CONTEXT, epoch=7)
        assert caught.value.field == "layers[layers.0].tail"


def test_a_context_that_a_side_cannot_hold() -> None:
    with started(options={**GEOMETRY, "max_positions": 32}) as handle:
        decoder = decoder_like(handle.manifest)
        with pytest.raises(Refused, match="context 33 is more than the source's 32") as caught:
            handle.attach(replace(decoder, max_positions=64), 33, epoch=7)
        assert caught.value.field == "context"
        with pytest.raises(Refused, match="context 20 is more than the decoder's 16"):
            handle.attach(replace(decoder, max_positions=16), 20, epoch=7)
        handle.attach(decoder, 32, epoch=7)


def test_more_memory_than_there_is() -> None:
    with (
        started(options={**GEOMETRY, "window": 0, "heads": 1 << 20}) as handle,
        pytest.raises(Refused, match="bytes available"),
    ):
        handle.attach(decoder_like(handle.manifest), 1 << 20, epoch=7)


@pytest.mark.parametrize(
    ("engine", "field", "text"),
    [
        ("nowhere", "source", "'nowhere'; known are torch, cuda, rngd, vllm, replay"),
        ("tests.nothing:open", "source", "cannot import it: No module named 'tests.nothing'"),
        ("tests.unit.runtime.engines:missing", "source", "has no factory 'missing'"),
        ("tests.unit.runtime.engines:open_raising", "engine", "OSError: no such device"),
        ("tests.unit.runtime.engines:open_refusing", "dtype", "will not do float8"),
        ("tests.unit.runtime.engines:open_unavailable", "", "is unavailable: vendor: probe"),
        ("tests.unit.runtime.engines:open_bad_manifest", "engine", "ZeroDivisionError"),
        ("tests.unit.runtime.engines:open_surrogate", "engine", "OSError: no file"),
    ],
)
def test_an_engine_that_cannot_be_opened(engine: str, field: str, text: str) -> None:
    with started(engine, {}) as handle, pytest.raises(Refused) as caught:
        _ = handle.manifest
    assert caught.value.field == field
    assert text in str(caught.value)


def test_an_engine_that_dies_while_loading() -> None:
    with started("tests.faults.engines:open_dying", {}) as handle:
        with pytest.raises(PeerDied, match=r"source .* died: exit status 9 while starting"):
            _ = handle.manifest
        assert handle.died()


def test_an_engine_that_is_killed_while_loading(tmp_path: Path) -> None:
    with started("tests.unit.runtime.engines:open_slow", {"pipe": fifo(tmp_path)}) as handle:
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(PeerDied, match="signal 9 while starting"):
            _ = handle.manifest


def test_an_engine_that_takes_too_long(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    with (
        started(
            "tests.unit.runtime.engines:open_slow", {"pipe": fifo(tmp_path)}, start_timeout_s=0.3
        ) as handle,
        pytest.raises(Refused, match="did not get ready in"),
    ):
        _ = handle.manifest
    assert 0.3 <= time.monotonic() - begun_s < 10.0


def fifo(directory: Path) -> str:
    path = directory / "pipe"
    os.mkfifo(path)
    return str(path)


def test_a_source_that_dies_before_it_is_attached() -> None:
    with started() as handle:
        decoder = decoder_like(handle.manifest)
        os.kill(handle.pid, signal.SIGKILL)
        assert handle.wait(10.0)
        with pytest.raises(PeerDied):
            handle.attach(decoder, CONTEXT, epoch=7)


def test_a_source_that_speaks_out_of_turn() -> None:
    with (
        started("tests.unit.runtime.engines:open_babbling", {}) as handle,
        pytest.raises(RemoteProtocolError, match="sent Attached first"),
    ):
        _ = handle.manifest


def test_descriptors_from_a_source_are_closed() -> None:
    """Otherwise each such message would cost this process a descriptor."""
    with started("tests.unit.runtime.engines:open_descriptors", {}) as handle:
        before = len(os.listdir("/proc/self/fd"))
        assert handle._channel is not None
        assert handle._channel.wait_readable(20.0)
        with pytest.raises(RemoteProtocolError, match="sends no descriptors"):
            handle.receive()
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_not_started() -> None:
    handle = SourceHandle("replay", GEOMETRY)
    for use in (
        lambda: handle.manifest,
        lambda: handle.pid,
        lambda: handle.slot(0),
        lambda: handle.channel_fd,
    ):
        with pytest.raises(Closed):
            use()
    handle.close()
    with pytest.raises(Refused, match="slots is 0") as caught:
        SourceHandle("replay", GEOMETRY, num_slots=0)
    assert caught.value.field == "slots"


def test_an_interpreter_that_is_missing() -> None:
    handle = SourceHandle("replay", GEOMETRY, interpreter="/nowhere/python")
    with pytest.raises(Refused, match="interpreter '/nowhere/python' is missing"):
        handle.start()
    handle.close()


@pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
def test_a_source_refuses_slots_of_another_size(
    monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """Both sides derive every offset from the plan: a slot of another size is no slot of it."""
    with started() as handle:
        decoder = decoder_like(handle.manifest)
        layout = slot_layout(decoder, CONTEXT)
        changed = layout._replace(nbytes=layout.nbytes + change)
        monkeypatch.setattr("headrace.runtime.worker.slot_layout", lambda *_: changed)
        text = f"slots of {changed.nbytes} bytes, the plan has {layout.nbytes}"
        with pytest.raises(Refused, match=text):
            handle.attach(decoder, CONTEXT, epoch=7)
        assert handle.wait(10.0)
        assert "exit status 1" in handle.exit_text()


@pytest.mark.parametrize("slot", [2, 3, 1 << 40])
def test_a_source_refuses_a_slot_that_is_not_there(slot: int) -> None:
    with started() as handle:
        handle.attach(decoder_like(handle.manifest), CONTEXT, epoch=7)
        handle.send(replace(ask(4), slot=slot))
        assert handle._channel is not None
        assert handle._channel.wait_readable(20.0)
        message = handle.receive()
        assert isinstance(message, Incompatible)
        assert message.reason == f"slot {slot} of 2"
        assert handle.wait(10.0)


def test_what_a_handle_counts() -> None:
    handle = SourceHandle("replay", GEOMETRY)
    assert handle.statistics() == {"alive": 0, "slots": 2, "slab_nbytes": 0}
    handle.start()
    handle.attach(decoder_like(handle.manifest), CONTEXT, epoch=7)
    counts = handle.statistics()
    assert (counts["alive"], counts["slab_nbytes"]) == (1, 2 * handle.slot_nbytes)
    assert (counts["sent"], counts["received"]) == (1, 2)  # hello; ready, attached
    handle.close()
    assert handle.statistics()["alive"] == 0


def test_the_handshake_in_pieces() -> None:
    """As an owner takes it that must not wait; the one that takes its place is the same."""
    with started() as first:
        first.attach(decoder_like(first.manifest), CONTEXT, epoch=7)
        second = first.respawn()
        assert second is not first
        second.start()
        try:
            assert second._channel is not None
            manifest = second.take_manifest()
            while manifest is None:
                second._channel.wait_readable(20.0)
                manifest = second.take_manifest()
            assert manifest == first.manifest
            second.greet(decoder_like(manifest), CONTEXT, 7)
            while not second.take_attached():
                second._channel.wait_readable(20.0)
            assert second.layout == first.layout
            assert second.num_slots == first.num_slots
        finally:
            second.close()


def test_sources_that_are_closed_together_share_one_grace() -> None:
    """Two are stopped and have to be killed; the third ends in good order meanwhile."""
    handles = [SourceHandle("replay", GEOMETRY, name=f"replay-{at}") for at in range(3)]
    for handle in handles:
        handle.start()
    for handle in handles:
        handle.attach(decoder_like(handle.manifest), CONTEXT, epoch=7)
    for handle in handles[1:]:
        os.kill(handle.pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    close_together(handles, grace_s=1.0)
    assert time.monotonic() - begun_s < 1.0 + 1.0
    texts = [handle.exit_text() for handle in handles]
    assert texts[0] == f"source replay-0 (pid {handles[0].pid}) died: exit status 0"
    assert all("signal 9" in text for text in texts[1:])
    assert [handle.running_pid for handle in handles] == [0, 0, 0]
    close_together(handles)


def test_a_source_is_called_by_its_name_and_so_is_the_next_one() -> None:
    with started(name="left") as handle:
        assert handle.respawn().name == "left"
        assert handle.late_text().startswith("source left did not")
        assert handle.running_pid == handle.pid
    assert SourceHandle("replay", GEOMETRY).name == "replay"
    assert SourceHandle("replay", GEOMETRY).running_pid == 0
