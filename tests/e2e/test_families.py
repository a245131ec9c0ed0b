"""The route changes only when bytes move: on every supported family, to the last bit.

Equality is with plain transformers in one process and its `DynamicCache(config=...)`, over tokens
and every logits row. It holds for one thread, one dtype, one attention implementation, one row of
logits per forward, one sequence per forward, and the same prefill chunk; other forward calls round
otherwise, with or without this project.
"""

from __future__ import annotations

import msgspec
import pytest

from headrace.backends import cpu as cpu_backend
from headrace.backends import torch as torch_backend
from headrace.backends.base import Entry
from headrace.errors import Cancelled, LocalProtocolError, Refused
from headrace.geometry import Emission
from headrace.ids import Span
from headrace.messages import Prefill
from headrace.testing.sinks import region_bytes
from tests.e2e.families import (
    CONTEXT,
    FAMILIES,
    UNSUPPORTED,
    WINDOW,
    FakeSink,
    decoder_of,
    directory_of,
    greedy,
    hand_off,
    make_prompt,
    make_sink,
    module_of,
    options,
    reference,
    slot_view,
    source_of,
)

CHUNK = 9
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, WINDOW - 1, WINDOW, WINDOW + 1, 43)
STEPS = 2 * WINDOW + 4  # a sliding lane is moved back to its front at least once
EMISSIONS: tuple[Emission, ...] = ("layers", "cache_groups")

families = pytest.mark.parametrize("family", FAMILIES)
hybrids = pytest.mark.parametrize("family", ["llama", "exaone4", "gemma4_shared", "gpt_oss"])


def prefill(family: str, prompt: list[int], asked: Prefill, dtype: str = "float32") -> FakeSink:
    source, decoder = source_of(family, dtype), decoder_of(family, dtype)
    sink = make_sink(source.manifest(), decoder.manifest(), asked)
    source.prefill_stream(prompt, sink)
    return sink


def every_route(num_tokens: int, prefill_chunk: int = 0) -> list[Prefill]:
    """The routes other than `whole`: each with and without transfer chunks, group sizes of one, an
    odd number and all.
    """
    chunked = [
        options("chunked", num_tokens, chunk=chunk, prefill_chunk=prefill_chunk)
        for chunk in (0, 1 if num_tokens < CHUNK else CHUNK)
    ]
    return chunked + [
        options(
            "streamed",
            num_tokens,
            group_layers=group_layers,
            chunk=chunk,
            prefill_chunk=prefill_chunk,
            emission=emission,
        )
        for group_layers, chunk in ((1, 0), (1, CHUNK), (3, 0), (3, CHUNK), (99, 0), (0, CHUNK))
        for emission in EMISSIONS
    ]


def decode(family: str, entry: Entry, first: memoryview | bytes, steps: int) -> list[bytes]:
    """All logits rows of a greedy continuation, the prefill's first."""
    rows = [bytes(first)]
    for _ in range(steps):
        (row,) = decoder_of(family).decode_step([(entry, greedy(rows[-1]))])
        rows.append(row.tobytes())
    return rows


@families
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_routes_put_the_same_bytes_into_the_slot(family: str, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens)
    whole = prefill(family, prompt, options("whole", num_tokens))
    cells = whole.cells()
    assert whole.spans == [(whole.plan.whole(),)]
    for asked in every_route(num_tokens):
        sink = prefill(family, prompt, asked)
        assert sink.cells() == cells, asked
        assert sink.logits == whole.logits, asked


@families
@pytest.mark.parametrize("num_tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 43])
def test_decode_equals_one_process(family: str, num_tokens: int) -> None:
    prompt = make_prompt(num_tokens)
    tokens, rows = reference(module_of(family), prompt, STEPS)
    for asked in (
        options("whole", num_tokens),
        options("chunked", num_tokens, chunk=CHUNK),
        options("streamed", num_tokens, group_layers=3, emission="cache_groups"),
        options("streamed", num_tokens, group_layers=1, chunk=CHUNK),
    ):
        sink, entry = hand_off(source_of(family), decoder_of(family), prompt, asked)
        assert sink.logits is not None
        got = decode(family, entry, sink.logits, STEPS)
        decoder_of(family).free(entry)
        assert [greedy(row) for row in got] == tokens, asked
        assert got == rows, asked
    assert len(set(tokens)) > 3, "a model that repeats itself would hide a fault"


@families
@pytest.mark.parametrize("prefill_chunk", [7, WINDOW, 42, 43])
def test_prefill_chunk_is_exact_for_itself(family: str, prefill_chunk: int) -> None:
    """Chunks of 42 of 43 positions leave one, and 43 is the unchunked prefill."""
    num_tokens = 43
    prompt = make_prompt(num_tokens)
    whole = prefill(family, prompt, options("whole", num_tokens, prefill_chunk=prefill_chunk))
    cells = whole.cells()
    for asked in every_route(num_tokens, prefill_chunk):
        sink = prefill(family, prompt, asked)
        assert (sink.cells(), sink.logits) == (cells, whole.logits), asked
    asked = options("streamed", num_tokens, group_layers=1, prefill_chunk=prefill_chunk)
    _, rows = reference(module_of(family), prompt, 4, prefill_chunk)
    sink, entry = hand_off(source_of(family), decoder_of(family), prompt, asked)
    assert sink.logits is not None
    got = decode(family, entry, sink.logits, 4)
    decoder_of(family).free(entry)
    assert got == rows


def test_prefill_chunk_is_part_of_the_pairing() -> None:
    """Chunked computing rounds otherwise, or the test above would show nothing."""
    prompt = make_prompt(43)
    whole = prefill("llama", prompt, options("whole", 43))
    chunked = prefill("llama", prompt, options("whole", 43, prefill_chunk=7))
    assert whole.cells() != chunked.cells()


@hybrids
def test_neighbours_change_nothing(family: str) -> None:
    """Two entries decoded in turn, and together, while a third lane is reserved and imported."""
    source, decoder = source_of(family), decoder_of(family)
    prompts = [make_prompt(WINDOW + 1, seed=1), make_prompt(5, seed=2)]
    wanted = [reference(module_of(family), prompt, STEPS)[1] for prompt in prompts]
    handed = [
        hand_off(source, decoder, prompt, options("streamed", len(prompt), group_layers=1))
        for prompt in prompts
    ]
    third = decoder.reserve(30)
    other = prefill(family, make_prompt(30, seed=3), options("whole", 30))
    slot = slot_view(other.buffer, other.plan.layout)
    copies = other.plan.copies(other.plan.whole())
    entries = [entry for _, entry in handed]
    got = [[bytes(sink.logits or b"")] for sink, _ in handed]
    for step in range(STEPS):
        decoder.begin_import(third, slot, copies[step % len(copies) :][:1])
        active = [(entry, greedy(rows[-1])) for entry, rows in zip(entries, got, strict=True)]
        if step % 2:
            rows = [decoder.decode_step([one])[0] for one in reversed(active)][::-1]
        else:
            rows = decoder.decode_step(active)
        for mine, row in zip(got, rows, strict=True):
            mine.append(row.tobytes())
    for entry in entries:
        decoder.free(entry)
    decoder.free(third)
    assert got == wanted


@hybrids
def test_token_major_slots_land_the_same(family: str) -> None:
    """A source of another layout: the decoder transposes while it imports."""
    source, decoder = source_of(family), decoder_of(family)
    theirs = msgspec.structs.replace(source.manifest(), layouts=("token_major",))
    num_tokens = WINDOW + 3
    prompt = make_prompt(num_tokens)
    asked = options("streamed", num_tokens, group_layers=2, chunk=CHUNK)
    sink = make_sink(theirs, decoder.manifest(), asked)
    assert sink.plan.layout == "token_major"
    source.prefill_stream(prompt, sink)
    reservation = decoder.reserve(num_tokens)
    slot = slot_view(sink.buffer, "token_major")
    copies = sink.plan.copies(sink.plan.whole())
    decoder.begin_import(reservation, slot, copies)
    ours = prefill(family, prompt, options("whole", num_tokens))
    wanted, slots = ours.cells(), sink.cells()
    for copy in copies:
        key = (copy.layer, copy.part)
        assert bytes(decoder.read(reservation, "head_major", copy)) == wanted[key]
        assert bytes(decoder.read(reservation, "token_major", copy)) == slots[key]
    decoder.free(reservation)


@hybrids
def test_start_leaves_the_first_positions_alone(family: str) -> None:
    """The others are those of a run from 0 that is cut there, by every route."""
    num_tokens, start = 43, 30
    prompt = make_prompt(num_tokens)
    for asked in (options("whole", num_tokens), *every_route(num_tokens, prefill_chunk=7)):
        chunk = asked.prefill_chunk
        cold = options("whole", num_tokens, prefill_chunk=chunk, cuts=(start,))
        whole = prefill(family, prompt, cold)
        told = msgspec.structs.replace(asked, start=start, cuts=(start,))
        sink = make_sink(source_of(family).manifest(), decoder_of(family).manifest(), told)
        source_of(family).prefill_stream(prompt, sink, start)
        assert all(span.start >= start for spans in sink.spans for span in spans)
        after = Span(0, len(sink.plan.layers), start, num_tokens)
        ours, theirs = sink.plan.copies(after), whole.plan.copies(after)
        for one, other in zip(ours, theirs, strict=True):
            assert region_bytes(sink.buffer, one.source) == region_bytes(
                whole.buffer, other.source
            ), asked


def test_cancelled_wherever_it_comes() -> None:
    """The sink's Cancelled passes through the model, and the next prefill is untouched by it."""
    prompt = make_prompt(43)
    for asked in (options("whole", 43), *every_route(43)):
        wanted = prefill("gemma3", prompt, asked)
        for at in range(0, wanted.num_writes, 3):
            sink = make_sink(source_of("gemma3").manifest(), decoder_of("gemma3").manifest(), asked)
            sink.cancel_at_write = at
            with pytest.raises(Cancelled):
                source_of("gemma3").prefill_stream(prompt, sink)
            assert sink.logits is None
    assert prefill("gemma3", prompt, asked).cells() == wanted.cells()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16(family: str) -> None:
    """Two bytes per element, which numpy has no name for."""
    num_tokens = WINDOW + 1
    prompt = make_prompt(num_tokens)
    source, decoder = source_of(family, "bfloat16"), decoder_of(family, "bfloat16")
    _, rows = reference(module_of(family, "bfloat16"), prompt, STEPS)
    asked = options("streamed", num_tokens, group_layers=3, chunk=CHUNK)
    sink, entry = hand_off(source, decoder, prompt, asked)
    got = [bytes(sink.logits or b"")]
    for _ in range(STEPS):
        got.append(decoder.decode_step([(entry, greedy(got[-1]))])[0].tobytes())
    decoder.free(entry)
    assert got == rows


@pytest.mark.parametrize(
    ("family", "kind"), [("deepseek_v3", "latent"), ("lfm2", "state")], ids=list(UNSUPPORTED)
)
def test_unsupported_families_are_refused_by_name(family: str, kind: str) -> None:
    for backend in (torch_backend, cpu_backend):
        with pytest.raises(Refused, match=rf"layers\.0 is {kind}") as caught:
            backend.open({"model": str(directory_of(family))})
        assert caught.value.field == "layers.0"


def test_the_context_is_the_limit() -> None:
    """A lane takes its last position and refuses the one after, without harm to what it holds."""
    decoder = decoder_of("gemma3")
    prompt = make_prompt(CONTEXT - 1)
    sink, entry = hand_off(source_of("gemma3"), decoder, prompt, options("whole", len(prompt)))
    _, rows = reference(module_of("gemma3"), prompt, 1)
    assert decode("gemma3", entry, sink.logits or b"", 1) == rows
    with pytest.raises(LocalProtocolError, match=f"{CONTEXT} of {CONTEXT} positions"):
        decoder.decode_step([(entry, 5)])
    decoder.free(entry)
