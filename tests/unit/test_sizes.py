"""Sizes past 2^31, 2^32 and 2^63: plans, prompts, slots, addresses, messages. Nothing is allocated.

All of it is arithmetic on Python integers, so what is looked for is a place that makes a float, a
32-bit number or a list as long as the prompt of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from headrace.coverage import Coverage
from headrace.engine.host import copy_rows
from headrace.errors import Refused, RemoteProtocolError
from headrace.geometry import (
    MAX_LAYERS,
    MAX_POSITIONS,
    Full,
    Layout,
    Part,
    Shared,
    Sliding,
    check_manifest,
)
from headrace.ids import AttemptId, SourceId, Span
from headrace.messages import (
    MAX_PROGRESS,
    Computing,
    Hello,
    Prefill,
    Progress,
    Released,
    Route,
    SourceFinal,
    decode_from_source,
    decode_to_source,
    encode,
)
from headrace.plan import Plan, Region, compile_plan
from headrace.protocol.books import Limits
from headrace.protocol.commands import Outcome, Publish, Report, StartImport, StartPrefill
from headrace.protocol.owner import Owner
from headrace.protocol.source import MOST_SPANS, SourceAttempt, expected_spans
from tests.unit.protocol.builders import decoder_manifest, layers

CONTROL_NBYTES = 65_024
U64 = (1 << 64) - 1
WIDE = (Part("k", 64, 128, "float32"), Part("v", 64, 256, "bfloat16"))  # 64 KiB of a position
NARROW = (Part("k", 1, 1, "uint8"),)
KINDS = (Full(), Sliding(131_072, 131_071), Shared("layers.0"), Full())
LONG = (1 << 31) + 11  # positions
LAYOUTS: tuple[Layout, ...] = ("head_major", "token_major")


def plan_of(num_tokens: int, context: int, layout: Layout, parts: tuple[Part, ...]) -> Plan:
    manifest = decoder_manifest(layers=layers(*KINDS, parts=parts), max_positions=MAX_POSITIONS - 1)
    check_manifest(manifest, "decoder")
    return compile_plan(manifest, layout, num_tokens, context)


def ranges(region: Region) -> Iterator[tuple[int, int]]:
    for row in range(region.rows):
        begin = region.offset + row * region.stride
        yield begin, begin + region.row_nbytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranges_of_a_plan_of_many_gib_follow_one_another(layout: Layout) -> None:
    """18 GiB and more in a slot: no byte twice, none outside."""
    n, context = 150_000, 200_000
    plan = plan_of(n, context, layout, WIDE)
    assert plan.nbytes == (2 * n + 131_071) * (1 << 16) > 1 << 34
    held = sorted(r for copy in plan.copies(plan.whole()) for r in ranges(copy.source))
    assert sum(end - begin for begin, end in held) == plan.nbytes
    assert held[0][0] == plan.slot.kv_offset
    assert held[-1][1] <= plan.slot.nbytes
    assert all(end <= begin for (_, end), (begin, _) in pairwise(held))
    assert all(type(number) is int for each in held for number in each)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("budget_nbytes", [(1 << 31) - 1, 1 << 31, (1 << 32) + 8])
def test_the_pieces_of_a_plan_of_many_gib_are_its_cells(layout: Layout, budget_nbytes: int) -> None:
    plan = plan_of(150_000, 200_000, layout, WIDE)
    pieces = plan.cut(plan.whole(), budget_nbytes)
    assert all(plan.span_nbytes(piece) <= budget_nbytes for piece in pieces)
    assert sum(map(plan.span_nbytes, pieces)) == plan.nbytes
    covered = Coverage(plan.windows, plan.num_tokens)
    covered.add(pieces)
    assert covered.complete


@pytest.mark.parametrize("at", [(1 << 31) - 1, 1 << 31, (1 << 32) - 3])
def test_positions_past_2_31_are_told_apart(at: int) -> None:
    n = MAX_POSITIONS - 1
    plan = plan_of(n, n, "head_major", NARROW)
    told = Coverage(plan.windows, plan.num_tokens)
    told.add([Span(0, 4, 0, at), Span(0, 4, at + 1, n)])
    assert told.first_missing() == Span(0, 1, at, at + 1)
    for wrong in (
        Span(0, 1, at - 1, at + 1),
        Span(0, 1, at, n + 1),
        Span(0, 1, at - (1 << 32), at),
    ):
        with pytest.raises(RemoteProtocolError):
            told.add([wrong])
    region = plan.region(3, 0, at, at + 1)
    assert region.offset == plan.slot.kv_offset + -(-n // 64) * 64 + 131_072 + at
    told.add([Span(0, 4, at, at + 1)])
    assert told.complete


def test_a_prompt_past_the_last_position_is_refused() -> None:
    with pytest.raises(Refused, match="prompt has 4294967296 tokens and the context holds"):
        plan_of(MAX_POSITIONS, MAX_POSITIONS - 1, "head_major", NARROW)
    for wrong in (0, -1, MAX_POSITIONS, 1 << 63):
        manifest = decoder_manifest(Full(), max_positions=wrong)
        with pytest.raises(Refused, match=f"max_positions is {wrong}"):
            check_manifest(manifest, "decoder")


def test_a_prompt_of_2_31_positions_is_served() -> None:
    """Through the owner's machine, in pieces of 2^30 bytes."""
    context = MAX_POSITIONS - 1

    def plan_for(num_tokens: int, start: int = 0) -> Plan:
        return plan_of(num_tokens, context, "token_major", NARROW)

    owner = Owner(U64, Limits(num_lanes=1, context=context, chunk_nbytes=1 << 30))
    owner.add_source(SourceId(0), 1, plan_for, 0)
    owner.submit(LONG, 0)
    (grant,) = [c for c in owner.commands() if isinstance(c, StartPrefill)]
    identity = grant.attempt, grant.slot, grant.generation
    half = LONG // 2
    for message in (
        Progress(*identity, (Span(0, 4, half, LONG), Span(0, 4, 0, half)), (), 0, U64, U64),
        SourceFinal(*identity, "logits", 0, 0, U64),
        Released(*identity),
    ):
        back = decode_from_source(encode(message))
        assert isinstance(back, Progress | SourceFinal | Released)
        owner.message(SourceId(0), back, 0)
    owner.begin_imports(1 << 60, 0)
    imports = [c for c in owner.commands() if isinstance(c, StartImport)]
    plan = plan_for(LONG)
    assert sum(plan.span_nbytes(c.piece) for c in imports) == plan.nbytes > 1 << 32
    for command in imports:
        owner.import_done(command.import_id, 0)
    (publish,) = [c for c in owner.commands() if isinstance(c, Publish)]
    owner.published(publish.attempt, 0)
    (report,) = [c for c in owner.commands() if isinstance(c, Report)]
    assert report.outcome is Outcome.PUBLISHED
    owner.retire(report.request, 0)
    owner.check_integrity()


@pytest.mark.parametrize("number", [1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, U64])
def test_numbers_of_64_bits_travel_as_they_are(number: int) -> None:
    attempt = AttemptId(number, number, number)
    manifest = decoder_manifest(Full())
    grant = Prefill(
        attempt, number, number, number, "chunked", number, number, number, "layers", True
    )
    for down in (Hello(number, manifest, number, number, number), grant):
        assert decode_to_source(encode(down)) == down
    spans = (Span(number, number, number, number),)
    for up in (
        Progress(attempt, number, number, spans, (number,), number, number, number),
        SourceFinal(attempt, number, number, "token", number, number, number),
        Computing(attempt, number, number),
    ):
        back = decode_from_source(encode(up))
        assert back == up
        assert type(msgspec.structs.astuple(back)[1]) is int


def test_no_number_beyond_64_bits_is_sent() -> None:
    with pytest.raises(OverflowError):
        encode(Computing(AttemptId(0, 0, 1), 1 << 64, 0))


@pytest.mark.parametrize("address", [(1 << 63) - 8, 1 << 63, (1 << 63) + 4096, U64 - (1 << 40)])
def test_addresses_past_2_63_stay_whole(address: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver maps for a device may lie there; such an address is only ever added to."""
    moved: list[tuple[int, ...]] = []
    monkeypatch.setattr(ctypes, "memmove", lambda *move: moved.append(move))
    copy_rows(address + 7, 1 << 33, address, Region(1 << 32, 2, 1 << 31, 1 << 34))
    first, second = (1 << 32), (1 << 32) + (1 << 34)
    assert moved == [
        (address + 7, address + first, 1 << 31),
        (address + 7 + (1 << 33), address + second, 1 << 31),
    ]
    assert ctypes.c_void_p(address).value == address


def test_a_tensor_over_an_address_past_2_63() -> None:
    pytest.importorskip("torch")
    from headrace.engine.tensors import over_address

    address = (1 << 63) + 4096
    part = Part("k", 1, 2, "bfloat16")
    row = over_address(address, Region(64, 1, 12, 0), part, 3, "token_major")
    at = row.data_ptr()
    del row  # no failure may print it: nothing is mapped there
    assert at == address + 64


@pytest.mark.parametrize(("route", "num_layers"), [("chunked", 16), ("streamed", MAX_LAYERS)])
def test_the_messages_of_the_largest_attempt_stay_small(route: Route, num_layers: int) -> None:
    """131072 positions, up to 8 TiB, cut as finely as may be, every span stamped."""
    n, parts = 131_072, (Part("k", 64, 1024, "bfloat16"),)
    listed = layers(*(Full(),) * num_layers, parts=parts)
    plan = compile_plan(decoder_manifest(layers=listed, max_positions=n), "head_major", n, n)
    assert plan.nbytes == num_layers << 34
    together = 1 if route == "streamed" else num_layers
    chunk = -(-n * (num_layers // together) // MOST_SPANS)
    attempt = AttemptId(U64, U64, U64)
    grant = Prefill(attempt, U64, U64, n, route, together, chunk, 0, "layers", True)
    assert MOST_SPANS * 0.9 < expected_spans(grant, plan) <= MOST_SPANS
    source = SourceAttempt(grant, plan)
    source.start(U64)
    sent = [encode(grant)]
    for start in range(0, n, chunk):
        for layer in range(0, num_layers, together):
            span = Span(layer, layer + together, start, min(start + chunk, n))
            sent += map(encode, source.commit([span], [(1 << 32) - 1], U64))
    sent += map(encode, source.final(None, U64, U64))
    sent.append(encode(source.returned()))
    assert max(map(len, sent)) < 4096 < CONTROL_NBYTES
    assert len(sent) <= MAX_PROGRESS
