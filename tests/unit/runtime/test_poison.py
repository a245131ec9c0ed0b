"""Poison: where it is put, how it is found, and what is no poison although it looks like it."""

from __future__ import annotations

import math
import random
import struct
from typing import Any

import pytest

from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.errors import Refused
from headrace.geometry import Layout, Manifest, Part
from headrace.ids import Span
from headrace.plan import Copy, Plan, compile_plan
from headrace.runtime.poison import PoisonMemory, fill, kv_range, poison_in

LAYOUTS: tuple[Layout, ...] = ("head_major", "token_major")
NUM_TOKENS = 20
WINDOW = 6


def plan_of(layout: Layout = "head_major", **changes: Any) -> Plan:
    facts: dict[str, Any] = {"layers": 3, "heads": 2, "head_dim": 8, "dtype": "float16"}
    options = {**facts, "window": WINDOW, "full_every": 3, "layout": layout, **changes}
    manifest: Manifest = open_replay(options).manifest()
    return compile_plan(decoder_like(manifest), layout, NUM_TOKENS, 32)


def copy_of(plan: Plan, layer: int, start: int = 0, stop: int = NUM_TOKENS, part: int = 0) -> Copy:
    found = plan.copies(Span(layer, layer + 1, start, stop))
    return next(copy for copy in found if copy.part == part)


def part_of(plan: Plan, copy: Copy) -> Part:
    return plan.layers[copy.layer].parts[copy.part]


def cells(plan: Plan, copy: Copy, bad: dict[int, list[int]], seed: int = 1) -> bytes:
    """Noise, with poison in the rows of `bad` heads by position."""
    part, rng = part_of(plan, copy), random.Random(seed)
    poison = bytearray(4096)
    fill(memoryview(poison))
    rows = {}
    for head in range(part.heads):
        for position in range(copy.start, copy.stop):
            spoilt = head in bad.get(position, [])
            nbytes = part.head_nbytes
            at = ((position - copy.start) * nbytes) % 2  # rows of an odd size begin at either byte
            rows[head, position] = (
                bytes(poison[at : at + nbytes]) if spoilt else rng.randbytes(nbytes)
            )
    order = [(h, p) for h in range(part.heads) for p in range(copy.start, copy.stop)]
    if plan.layout == "token_major":
        order.sort(key=lambda row: (row[1], row[0]))
    return b"".join(rows[row] for row in order)


def test_the_pattern_is_a_nan_in_every_float_type() -> None:
    buffer = memoryview(bytearray(64))
    fill(buffer)
    for code in ("<e", "<f", "<d"):
        assert all(math.isnan(value) for (value,) in struct.iter_unpack(code, buffer))
    for at in range(0, 64, 2):  # bfloat16: the upper half of a float32
        (value,) = struct.unpack("<f", b"\0\0" + bytes(buffer[at : at + 2]))
        assert math.isnan(value)


def test_no_byte_outside_the_buffer_is_filled() -> None:
    memory = bytearray(1 << 20)
    fill(memoryview(memory)[1000 : (1 << 20) - 1001])
    assert not any(memory[:1000])
    assert not any(memory[-1001:])
    assert memory[1000:1002] == b"\xf5\x7f"
    assert 0 not in memory[1000:-1001]
    fill(memoryview(bytearray()))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    ("positions", "shown"),
    [
        ([19], "[19, 20)"),
        ([14, 15, 16], "[14, 17)"),
        ([14, 16, 18], "[14, 15), [16, 17), [18, 19)"),
        (list(range(14, 20)), "[14, 20)"),
    ],
)
@pytest.mark.parametrize("heads", [[0], [1], [0, 1]])
def test_rows_are_found_where_they_are(
    layout: Layout, layer: int, positions: list[int], shown: str, heads: list[int]
) -> None:
    """In sliding and full layers, whichever head it is."""
    plan = plan_of(layout)
    copy = copy_of(plan, layer)
    assert copy.start == (NUM_TOKENS - WINDOW if layer == 0 else 0)
    data = cells(plan, copy, dict.fromkeys(positions, heads))
    expected = f"layer {layer} part k positions {shown}"
    assert poison_in(plan, copy, data) == expected
    assert poison_in(plan, copy, memoryview(data)) == expected


def test_many_stretches_are_counted() -> None:
    plan = plan_of()
    copy = copy_of(plan, 2, part=1)
    data = cells(plan, copy, {position: [0] for position in range(0, 20, 2)})
    text = poison_in(plan, copy, data)
    assert text.startswith("layer 2 part v positions [0, 1), [2, 3)")
    assert text.endswith("and 6 more stretches")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "head_dim"), [("uint8", 9), ("uint8", 17), ("float8_e5m2", 15)])
def test_rows_of_an_odd_size_are_found_at_either_byte(
    layout: Layout, dtype: str, head_dim: int
) -> None:
    plan = plan_of(layout, dtype=dtype, head_dim=head_dim)
    copy = copy_of(plan, 2)
    for position in (3, 4):
        text = poison_in(plan, copy, cells(plan, copy, {position: [0]}))
        assert text == f"layer 2 part k positions [{position}, {position + 1})"


def test_rows_below_eight_bytes_are_found_beside_each_other_only() -> None:
    plan = plan_of(heads=1, head_dim=2)  # four bytes
    copy = copy_of(plan, 2)
    assert poison_in(plan, copy, cells(plan, copy, {4: [0]})) == ""
    assert poison_in(plan, copy, cells(plan, copy, {4: [0], 5: [0]})).endswith("[4, 6)")


def test_a_stretch_across_two_rows_is_told_as_where_it_begins() -> None:
    """It fills neither, but no cache that was computed holds it."""
    plan = plan_of()
    copy = copy_of(plan, 2)
    data = bytearray(cells(plan, copy, {}))
    fill(memoryview(data)[4 * 16 + 8 : 5 * 16 + 8])
    assert poison_in(plan, copy, bytes(data)) == "layer 2 part k positions [4, 5)"


@pytest.mark.parametrize("seed", range(20))
def test_noise_holds_none(seed: int) -> None:
    plan = plan_of(heads=4, head_dim=64)
    for copy in plan.copies(plan.whole()):
        assert poison_in(plan, copy, cells(plan, copy, {}, seed)) == ""


def test_a_row_is_found_across_the_blocks_that_a_view_is_searched_in() -> None:
    plan = compile_plan(
        decoder_like(open_replay({"layers": 1, "heads": 1, "head_dim": 64}).manifest()),
        "head_major",
        4096,
        4096,
    )
    copy = copy_of(plan, 0, 0, 4096)
    row = part_of(plan, copy).head_nbytes
    for position in range(0, 4096, 97):
        data = bytearray(4096 * row)
        fill(memoryview(data)[position * row : (position + 1) * row])
        expected = f"layer 0 part k positions [{position}, {position + 1})"
        assert poison_in(plan, copy, memoryview(data)) == expected


def test_the_memory_serves_the_largest_plan_and_all_smaller_ones() -> None:
    memory = PoisonMemory()
    assert memory.nbytes == 0
    small, large = plan_of(), plan_of(head_dim=64)
    first = memory.as_slot(small)
    assert len(first.buffer) == memory.nbytes == kv_range(small)[1]
    begin, end = kv_range(small)
    assert bytes(first.buffer[begin : begin + 4]) == b"\xf5\x7f\xf5\x7f"
    assert end > begin
    second = memory.as_slot(large)
    assert len(second.buffer) == memory.nbytes == kv_range(large)[1]
    assert memory.as_slot(small).address == second.address
    assert bytes(first.buffer[begin : begin + 2]) == b"\xf5\x7f"  # a view keeps what it shows


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.capacity.available_nbytes", lambda: 0)
    with pytest.raises(Refused, match="a slot full of poison"):
        PoisonMemory().make(plan_of())
