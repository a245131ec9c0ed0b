"""Lanes: rows in place give what transformers' cache layers give, and nothing stale is heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headrace.backends import cpu as cpu_backend
from headrace.backends.base import Entry, Reservation
from headrace.engine.lanes import Lane, capacity, lane_nbytes
from headrace.engine.tensors import check_region, copy_in, over_region
from headrace.errors import Closed, LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Full, Layer, Part, Shared, Sliding
from headrace.plan import Copy, Region
from tests.e2e.families import (
    CONTEXT,
    FakeSink,
    decoder_of,
    directory_of,
    greedy,
    hand_off,
    make_prompt,
    make_sink,
    options,
    slot_view,
    source_of,
)

PARTS = (Part("k", 2, 4, "float32"), Part("v", 2, 4, "float32"))


def layer(kind: Any, index: int = 0, parts: tuple[Part, ...] = PARTS) -> Layer:
    return Layer(index, f"layers.{index}", kind, parts)


def states(first: int, count: int) -> torch.Tensor:
    """Rows [1, 2, count, 4] that say which position they are."""
    heads = torch.tensor([0.0, 0.5])[None, :, None, None]
    return (torch.arange(first, first + count)[None, None, :, None] + heads).expand(1, 2, count, 4)


# Rows.


@pytest.mark.parametrize("window", [2, 3, 7, 16])
@pytest.mark.parametrize("num_tokens", [1, 2, 6, 7, 8, 15, 40])
def test_sliding_rows_equal_transformers(window: int, num_tokens: int) -> None:
    """Step by step past several moves back to the front: rows, mask sizes and lengths."""
    context = num_tokens + 5 * window
    lane = Lane([layer(Sliding(window, window - 1))], context)
    lane.begin(num_tokens)
    first = max(0, num_tokens - (window - 1))
    for part in range(2):
        rows = states(first, num_tokens - first)[0] + 100 * part
        lane.cells(0, part, first, num_tokens).copy_(rows)
    lane.publish()
    theirs = DynamicSlidingWindowLayer(sliding_window=window)
    theirs.update(states(0, num_tokens), states(0, num_tokens) + 100)
    moves = 0
    ours = lane.cache.layers[0]
    for position in range(num_tokens, context):
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        assert ours.get_seq_length() == theirs.get_seq_length() == position
        origin = ours.origin
        new = states(position, 1)
        got = ours.update(new, new + 100)
        wanted = theirs.update(new, new + 100)
        moves += ours.origin != origin
        for mine, other in zip(got, wanted, strict=True):
            assert torch.equal(mine, other)
            assert mine.shape[2] <= window
    assert lane.length == context
    assert moves >= 1


def test_full_rows_equal_transformers() -> None:
    lane = Lane([layer(Full())], 20)
    lane.begin(5)
    for part in range(2):
        lane.cells(0, part, 0, 5).copy_(states(0, 5)[0] + 100 * part)
    lane.publish()
    theirs = DynamicLayer()
    theirs.update(states(0, 5), states(0, 5) + 100)
    ours = lane.cache.layers[0]
    for position in range(5, 20):
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
        new = states(position, 1)
        got, wanted = ours.update(new, new + 100), theirs.update(new, new + 100)
        assert all(torch.equal(mine, other) for mine, other in zip(got, wanted, strict=True))
        assert got[0].data_ptr() == ours.keys.data_ptr(), "a view, not a copy"


def test_a_step_is_one_position() -> None:
    lane = Lane([layer(Full())], 20)
    lane.begin(1)
    lane.publish()
    with pytest.raises(LocalProtocolError, match="of 2 positions"):
        lane.cache.layers[0].update(states(1, 2), states(1, 2))


def test_rewind_undoes_a_step_even_after_a_move_back() -> None:
    lane = Lane([layer(Sliding(3, 2))], 50)
    lane.begin(1)
    lane.cells(0, 0, 0, 1).copy_(states(0, 1)[0])
    lane.publish()
    ours = lane.cache.layers[0]
    for position in range(1, 40):
        before = lane.length
        ours.update(states(900, 1), states(900, 1))
        lane.rewind(before)
        keys, _ = ours.update(states(position, 1), states(position, 1))
        first = max(0, position - 2)
        assert torch.equal(keys, states(first, position + 1 - first))


def test_capacity() -> None:
    assert capacity(layer(Full()), 100) == 100
    assert capacity(layer(Sliding(16, 15)), 100) == 31
    assert capacity(layer(Sliding(16, 15)), 20) == 20


def test_storage_is_aligned_disjoint_and_counts_its_bytes() -> None:
    layers = [
        layer(Sliding(5, 4)),
        layer(Shared("layers.0"), 1, ()),
        layer(Full(), 2, (Part("k", 3, 5, "bfloat16"), Part("v", 1, 2, "float32"))),
    ]
    lane = Lane(layers, 30)
    tensors = [tensor for parts in lane.storage.parts for tensor in parts]
    assert [tuple(tensor.shape) for tensor in tensors] == [
        (2, 9, 4),
        (2, 9, 4),
        (3, 30, 5),
        (1, 30, 2),
    ]
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    assert all(address % 64 == 0 for address, _ in spans)
    ends = [address + nbytes for address, nbytes in spans]
    assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
    assert spans[0][0] == lane.storage.address
    assert ends[-1] <= lane.storage.address + lane.storage.nbytes
    assert lane.cache.is_dummy == [False, True, False]


def test_cells_are_only_the_prompts() -> None:
    lane = Lane([layer(Sliding(5, 4)), layer(Shared("layers.0"), 1, ())], 30)
    lane.begin(10)
    assert lane.cells(0, 0, 6, 10).shape == (2, 4, 4)
    for start, stop in ((5, 10), (6, 11), (7, 7), (8, 7)):
        with pytest.raises(LocalProtocolError, match=r"\[6, 10\)"):
            lane.cells(0, 0, start, stop)
    with pytest.raises(LocalProtocolError):
        lane.cells(1, 0, 0, 1)
    lane.publish()
    ours = lane.cache.layers[0]
    for position in range(10, 16):
        ours.update(states(position, 1), states(position, 1))
    with pytest.raises(LocalProtocolError, match="the lane's prompt has"):
        lane.cells(0, 0, 6, 10)  # moved away: what lies there now is another position


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(Refused, match="a lane: needs"):
        Lane([layer(Full(), parts=(Part("k", 1 << 20, 1 << 20, "float32"),) * 2)], 1 << 20)


@pytest.mark.parametrize("context", [1, 20, 700])
def test_the_memory_of_a_lane_is_known_before_it_is_had(context: int) -> None:
    layers = [layer(Sliding(5, 4)), layer(Full(), 1), layer(Shared("layers.0"), 2, ())]
    assert lane_nbytes(layers, context) == Lane(layers, context).storage.nbytes
    assert lane_nbytes([layer(Shared("layers.9"), 0, ())], context) > 0


def test_the_memory_of_all_lanes_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane alone may fit where all of them do not."""
    asked: list[int] = []
    monkeypatch.setattr(cpu_backend, "require_memory", lambda nbytes, what: asked.append(nbytes))
    given = {"model": str(directory_of("llama")), "lanes": 3, "context": CONTEXT}
    decoder = cpu_backend.open(given)
    assert asked == [3 * lane_nbytes(decoder.manifest().layers, CONTEXT)]
    decoder.close()
    monkeypatch.undo()
    with pytest.raises(Refused, match="1000000000 lanes: needs"):
        cpu_backend.open({**given, "lanes": 10**9})


# The decoder over them.


def handed(num_tokens: int = 20, family: str = "gemma3") -> tuple[FakeSink, list[Copy]]:
    sink = make_sink(
        source_of(family).manifest(), decoder_of(family).manifest(), options("whole", num_tokens)
    )
    source_of(family).prefill_stream(make_prompt(num_tokens), sink)
    return sink, sink.plan.copies(sink.plan.whole())


def test_lanes_are_counted_and_reused_under_new_serials() -> None:
    decoder = cpu_backend.open({"model": str(directory_of("llama")), "lanes": 2, "context": 32})
    assert decoder.caps.max_lanes == 2
    first, second = decoder.reserve(3), decoder.reserve(4)
    with pytest.raises(WouldBlock):
        decoder.reserve(1)
    entry = decoder.publish(second)
    assert (entry.lane, entry.num_tokens, entry.serial) == (second.lane, 4, second.serial)
    counts = dict(decoder.statistics())
    assert counts.pop("nbytes") >= 2 * 4 * 2 * 2 * 16 * 4 * 32
    assert counts == {
        "lanes_free": 0,
        "lanes_reserved": 1,
        "lanes_published": 1,
        "storages": 2,
        "storages_free": 0,
        "storages_kept": 0,
        "kept": 0,
        "kept_nbytes": 0,
    }
    decoder.free(first)
    again = decoder.reserve(5)
    assert again.lane == first.lane
    assert again.serial != first.serial
    decoder.close()
    with pytest.raises(Closed):
        decoder.decode_step([])


@pytest.mark.parametrize("num_tokens", [0, -1, CONTEXT + 1])
def test_prompts_that_never_fit(num_tokens: int) -> None:
    with pytest.raises(LocalProtocolError, match="a lane holds 1 to"):
        decoder_of("gemma3").reserve(num_tokens)


def test_only_its_holder_can_use_a_lane() -> None:
    decoder = decoder_of("gemma3")
    sink, copies = handed()
    slot = slot_view(sink.buffer, "head_major")
    old = decoder.reserve(20)
    decoder.free(old)
    held = decoder.reserve(20)
    assert held.lane == old.lane
    as_entry = Entry(held.lane, 20, held.serial)
    nowhere = Reservation(99, 20, 1)

    def refuse(text: str, use: Callable[..., object], *args: object) -> None:
        with pytest.raises(LocalProtocolError, match=text):
            use(*args)

    for stale, text in ((old, "serial"), (nowhere, "lane 99")):
        refuse(text, decoder.begin_import, stale, slot, copies)
        refuse(text, decoder.publish, stale)
        refuse(text, decoder.free, stale)
        refuse(text, decoder.read, stale, "head_major", copies[0])
    text = "reserved, not published"
    refuse(text, decoder.decode_step, [(as_entry, 3)])
    refuse(text, decoder.free, as_entry)
    refuse(text, decoder.read, as_entry, "head_major", copies[0])
    entry = decoder.publish(held)
    text = "published, not reserved"
    refuse(text, decoder.publish, held)
    refuse(text, decoder.free, held)
    refuse(text, decoder.begin_import, held, slot, copies)
    decoder.free(entry)
    refuse("free, not published", decoder.free, entry)
    refuse("free, not published", decoder.decode_step, [(entry, 3)])


def test_types_tell_reservations_from_entries() -> None:
    decoder = decoder_of("gemma3")
    reservation = decoder.reserve(4)
    with pytest.raises(LocalProtocolError, match="where a lane that is reserved is needed"):
        decoder.publish(Entry(reservation.lane, 4, reservation.serial))  # type: ignore[arg-type]
    decoder.free(reservation)


def wrong_copies(copy: Copy) -> dict[str, Copy]:
    source = copy.source
    return {
        "layer past the model": copy._replace(layer=4),
        "negative layer": copy._replace(layer=-1),
        "part past the layer": copy._replace(part=2),
        "negative part": copy._replace(part=-1),
        "positions before the window": copy._replace(start=copy.start - 1, stop=copy.stop - 1),
        "positions past the prompt": copy._replace(start=copy.start + 1, stop=copy.stop + 1),
        "no positions": copy._replace(stop=copy.start, source=source._replace(row_nbytes=0)),
        "more positions than bytes": copy._replace(start=copy.start + 1),
        "too many rows": copy._replace(source=source._replace(rows=source.rows + 1)),
        "past the slot": copy._replace(source=source._replace(offset=1 << 40)),
        "before the slot": copy._replace(source=source._replace(offset=-64)),
        "overlapping heads": copy._replace(source=source._replace(stride=8)),
        "unaligned": copy._replace(source=source._replace(offset=source.offset + 1)),
    }


@pytest.mark.parametrize("name", wrong_copies(Copy(0, 0, 0, 1, Region(0, 1, 1, 1))))
def test_an_import_is_checked_whole_before_a_byte_is_written(name: str) -> None:
    decoder = decoder_of("gemma3")
    sink, copies = handed()
    slot = slot_view(sink.buffer, "head_major")
    held = decoder.reserve(20)
    lane = decoder._lanes._records[held.lane].lane
    for parts in lane.storage.parts:
        for tensor in parts:
            tensor.fill_(7.0)
    with pytest.raises(LocalProtocolError):
        decoder.begin_import(held, slot, [*copies[1:], wrong_copies(copies[0])[name]])
    assert all(bool((tensor == 7.0).all()) for parts in lane.storage.parts for tensor in parts)
    decoder.free(held)


def test_an_import_touches_its_own_rows_only() -> None:
    decoder = decoder_of("gemma3")
    sink, copies = handed(30)
    slot = slot_view(sink.buffer, "head_major")
    held = decoder.reserve(30)
    lane = decoder._lanes._records[held.lane].lane
    for parts in lane.storage.parts:
        for tensor in parts:
            tensor.fill_(7.0)
    decoder.begin_import(held, slot, copies)
    wanted = sink.cells()
    for copy in copies:
        assert bytes(decoder.read(held, "head_major", copy)) == wanted[copy.layer, copy.part]
        rows = copy.stop - copy.start
        assert bool((lane.storage.parts[copy.layer][copy.part][:, rows:] == 7.0).all())
    decoder.free(held)


def test_a_read_only_slot_can_be_imported() -> None:
    """An owner may map a slab without the right to write."""
    decoder = decoder_of("gemma3")
    sink, copies = handed()
    for layout in ("head_major", "token_major"):
        held = decoder.reserve(20)
        view = slot_view(sink.buffer, "head_major")._replace(buffer=sink.buffer.toreadonly())
        if layout == "token_major":
            one = copies[0]
            source = Region(one.source.offset, 1, one.nbytes, 0)
            decoder.begin_import(
                held, view._replace(layout="token_major"), [one._replace(source=source)]
            )
        else:
            decoder.begin_import(held, view, copies)
        decoder.free(held)


def test_steps_that_cannot_be_made_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("gemma3")
    made = [
        hand_off(source_of("gemma3"), decoder, make_prompt(n), options("whole", n)) for n in (9, 20)
    ]
    (one, two) = (entry for _, entry in made)
    for active, text in (
        ([(one, 3), (one, 4)], "twice"),
        ([(one, 3), (two, 128)], "vocabulary"),
        ([(one, -1)], "vocabulary"),
    ):
        with pytest.raises(LocalProtocolError, match=text):
            decoder.decode_step(active)
    model = decoder._model
    assert model is not None
    forward = type(model).forward
    calls = []

    def failing(self: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            forward(self, ids, cache)
            raise RuntimeError("the device failed")
        return forward(self, ids, cache)

    with monkeypatch.context() as patched:
        patched.setattr(type(model), "forward", failing)
        with pytest.raises(RuntimeError, match="the device failed"):
            decoder.decode_step([(one, 3), (two, 4)])
    rows = [row.tobytes() for row in decoder.decode_step([(one, 3), (two, 4)])]
    for entry in (one, two):
        decoder.free(entry)
    again = [
        hand_off(source_of("gemma3"), decoder, make_prompt(n), options("whole", n))[1]
        for n in (9, 20)
    ]
    assert rows == [row.tobytes() for row in decoder.decode_step([(again[0], 3), (again[1], 4)])]
    assert decoder.decode_step([]) == []
    for entry in again:
        decoder.free(entry)


def test_rows_of_logits_are_float32() -> None:
    decoder = decoder_of("gemma3", "bfloat16")
    sink, entry = hand_off(
        source_of("gemma3", "bfloat16"), decoder, make_prompt(5), options("whole", 5)
    )
    (row,) = decoder.decode_step([(entry, greedy(sink.logits or b""))])
    assert (row.format, row.nbytes) == ("f", decoder.manifest().vocab_size * 4)
    decoder.free(entry)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"context": 513}, "the model was made for 512"),
        ({"context": 0}, "context"),
        ({"lanes": 0}, "lanes"),
        ({"device": "cuda"}, "unknown field `device`"),
    ],
)
def test_options_the_decoder_cannot_serve(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=text):
        cpu_backend.open({"model": str(directory_of("llama")), **options})


def test_the_context_defaults_to_the_models() -> None:
    decoder = cpu_backend.open({"model": str(directory_of("llama"))})
    assert decoder.manifest().max_positions == 512


# Tensors over a slot.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["head_major", "token_major"])
def test_copy_in_puts_common_positions_in_place(dtype: str, layout: Any) -> None:
    part = Part("k", 2, 4, dtype)
    item = 4 if dtype == "float32" else 2
    owned = bytearray(4096)
    buffer = memoryview(owned)
    rows, row = (2, 6 * 4 * item) if layout == "head_major" else (1, 6 * 8 * item)
    region = Region(64, rows, row, 1024 if rows > 1 else 0)

    class Here:
        def __init__(self) -> None:
            self.buffer, self.region = buffer, region
            self.layer, self.part, self.start, self.stop = 0, 0, 10, 16

    made = states(0, 20)[0].to(getattr(torch, dtype))
    copy_in(Here(), [part], layout, made[:, :13], 0)
    copy_in(Here(), [part], layout, made[:, 13:], 13)
    copy_in(Here(), [part], layout, made[:, :2] * 0, 16)
    cells = over_region(buffer, region, part, 6, layout)
    assert torch.equal(cells, made[:, 10:16])
    outside = np.frombuffer(buffer, np.uint8)
    assert not outside[:64].any()
    del cells, outside
    buffer.release()
    owned.clear()  # a tensor that outlived the copies would forbid this


def test_tensors_over_a_slot_keep_it() -> None:
    owned = bytearray(512)
    buffer = memoryview(owned)
    cells = over_region(buffer, Region(0, 1, 64, 0), Part("k", 2, 4, "float32"), 2, "token_major")
    buffer.release()
    with pytest.raises(BufferError):
        owned.clear()
    del cells
    owned.clear()


def test_regions_are_checked() -> None:
    part = Part("k", 2, 4, "float32")
    check_region(Region(0, 2, 32, 64), part, 2, "head_major", 96)
    with pytest.raises(LocalProtocolError, match="reaches past the 95 bytes"):
        check_region(Region(0, 2, 32, 64), part, 2, "head_major", 95)
