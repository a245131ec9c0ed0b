"""Memories, lanes and kept prompts through thousands of random operations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from headrace.backends.base import Entry, Kept, Reservation
from headrace.backends.lane_table import LaneTable, Move, copy_now
from headrace.backends.storages import Storages, tails_nbytes
from headrace.engine.lanes import host_bytes, lane_nbytes
from headrace.errors import DeviceError, LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Full, Kind, Layer, Part, Shared, Sliding
from headrace.plan import live_window

PARTS = (Part("k", 2, 1, "float32"), Part("v", 1, 2, "float32"))
WINDOW = 5
CONTEXT = 24
LANES, EXTRA = 3, 2


def layers_of(*kinds: Kind) -> list[Layer]:
    parts = [() if isinstance(kind, Shared) else PARTS for kind in kinds]
    pairs = zip(kinds, parts, strict=True)
    return [Layer(at, f"layers.{at}", kind, own) for at, (kind, own) in enumerate(pairs)]


HYBRID = layers_of(
    Sliding(WINDOW, WINDOW - 1), Full(), Shared("layers.1"), Sliding(WINDOW, WINDOW), Full()
)
FULL = layers_of(Full(), Full())
WINDOWS = layers_of(Sliding(WINDOW, WINDOW - 1))


def rows(layer: Layer, part: int, values: Sequence[float]) -> torch.Tensor:
    """What a layer holds of positions with these values, [heads, positions, head_dim]."""
    shape = layer.parts[part]
    line = torch.tensor(values, dtype=torch.float32) + 1000 * layer.index + 100 * part
    heads = torch.arange(shape.heads, dtype=torch.float32)[:, None, None] * 10
    return line[None, :, None].expand(-1, -1, shape.head_dim) + heads


@dataclass
class Sequenced:
    """A lane's sequence: the value of each of its positions, the prompt's first."""

    held: Reservation | Entry
    values: list[float]


@dataclass
class Walk:
    """Random operations on a table, beside a plain account of what each holds."""

    layers: list[Layer]
    seed: int
    moved: list[Move] = field(default_factory=list)
    lanes: list[Sequenced] = field(default_factory=list)
    lost: list[Sequenced] = field(default_factory=list)
    kept: list[tuple[Kept, list[float]]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.table = LaneTable(self.layers, CONTEXT, LANES, extra=EXTRA, copier=self.copy)

    def copy(self, moves: Sequence[Move]) -> None:
        self.moved = list(moves)
        copy_now(moves)

    def step(self) -> None:
        acts = (self.reserve, self.reserve_from, self.publish, self.decode, self.free, self.evict)
        (act,) = self.rng.choices(acts, (2, 5, 5, 3, 5, 1))
        act()
        self.seen[act.__name__] += 1

    def values(self, count: int) -> list[float]:
        return [float(self.rng.randrange(100)) / 8 for _ in range(count)]

    def make_room(self) -> None:
        """As an owner does before it reserves."""
        while self.kept and self.table.statistics()["storages_kept"] > EXTRA:
            self.evict()

    def reserve(self) -> None:
        values = self.values(self.rng.randint(1, CONTEXT - 4))
        self.make_room()
        try:
            held = self.table.reserve(len(values))
        except WouldBlock:
            assert len(self.lanes) + len(self.lost) == LANES
            return
        self.fill(held, values, 0)

    def reserve_from(self) -> None:
        self.make_room()
        if not self.kept:
            return
        kept, values = self.rng.choice(self.kept)
        positions = self.rng.choice([len(values), len(values), self.rng.randint(1, len(values))])
        new = self.values(self.rng.choice([0, self.rng.randint(0, CONTEXT - 4)]))
        values = [*values[:positions], *new][: CONTEXT - 2]
        reusable = self.table.can_reuse(kept, positions) and positions <= len(values)
        on_it = [other for other, _ in self.kept if other.storage == kept.storage]
        in_place = self.user_of(kept.storage) is None and all(
            other.num_tokens <= positions for other in on_it
        )
        try:
            held = self.table.reserve_from(kept, positions, len(values))
        except WouldBlock:
            assert len(self.lanes) + len(self.lost) == LANES
            return
        except LocalProtocolError:
            assert not reusable
            self.seen["refused"] += 1
            return
        assert reusable
        assert (self.user_of(kept.storage) == held.lane) is in_place
        self.seen["in place" if in_place else "copied"] += 1
        full = [layer for layer in self.layers if isinstance(layer.kind, Full)]
        shapes = [target.shape[1] for target, _ in self.moved]
        assert all(target.shape == source.shape for target, source in self.moved)
        if in_place and len(full) == len(self.layers):
            assert not shapes, "no byte moves"
        self.fill(held, values, positions)

    def user_of(self, storage: int) -> int | None:
        return self.table._storages._memories[storage].lane

    def fill(self, held: Reservation, values: list[float], first: int) -> None:
        """As imports of [first, n) do."""
        lane = self.table._records[held.lane].lane
        for layer in self.layers:
            start, stop = live_window(layer, len(values))
            start = max(start, first)
            for part in range(len(layer.parts)):
                if start < stop:
                    cells = lane.cells(layer.index, part, start, stop)
                    cells.copy_(rows(layer, part, values[start:stop]))
        self.lanes.append(Sequenced(held, values))

    def publish(self) -> None:
        reserved = [each for each in self.lanes if isinstance(each.held, Reservation)]
        if not reserved:
            return
        chosen = self.rng.choice(reserved)
        assert isinstance(chosen.held, Reservation)
        chosen.held = self.table.publish(chosen.held)
        if self.rng.random() < 0.7:
            self.kept.append((self.table.keep(chosen.held), list(chosen.values)))

    def decode(self) -> None:
        for each in self.lanes:
            steps = self.rng.randint(0, 8)
            if isinstance(each.held, Entry):
                for value in self.values(min(steps, CONTEXT - len(each.values))):
                    (lane,) = self.table.decoding([each.held])
                    for layer, cached in zip(self.layers, lane.cache.layers, strict=True):
                        if layer.parts:
                            one = [rows(layer, part, [value])[None] for part in (0, 1)]
                            cached.update(*one)
                    each.values.append(value)

    def free(self) -> None:
        if not self.lanes:
            return
        chosen = self.lanes.pop(self.rng.randrange(len(self.lanes)))
        if not self.lost and self.seen.total() > 1000:
            self.lost.append(chosen)
        else:
            self.table.free(chosen.held)

    def evict(self) -> None:
        if self.kept:
            self.table.evict(self.kept.pop(self.rng.randrange(len(self.kept)))[0])

    def check(self) -> None:
        self.table.check_integrity()
        self.check_counts()
        for kept, values in self.kept:
            for layer in self.layers:
                start, stop = live_window(layer, len(values))
                held = self.table._storages.rows(kept, layer, start, stop) if layer.parts else ()
                for part, got in enumerate(held):
                    assert torch.equal(got, rows(layer, part, values[start:stop]))
        for each in (*self.lanes, *self.lost):
            self.check_lane(each)

    def check_lane(self, each: Sequenced) -> None:
        lane = self.table._records[each.held.lane].lane
        for layer, cached in zip(self.layers, lane.cache.layers, strict=True):
            if not layer.parts:
                continue
            if isinstance(each.held, Entry):
                assert cached.length == len(each.values)
            _, prompt = live_window(layer, each.held.num_tokens)
            stop = cached.length if isinstance(each.held, Entry) else prompt
            start = max(live_window(layer, stop)[0], cached.origin)
            for part, tensor in enumerate((cached.keys, cached.values)):
                got = tensor[0, :, start - cached.origin : stop - cached.origin]
                assert torch.equal(got, rows(layer, part, each.values[start:stop]))

    def tail_nbytes(self, num_tokens: int) -> int:
        tails = [layer.kind.tail for layer in self.layers if isinstance(layer.kind, Sliding)]
        return sum(min(tail, num_tokens) for tail in tails) * sum(part.row_nbytes for part in PARTS)

    def check_counts(self) -> None:
        counts = self.table.statistics()
        assert counts["storages"] == LANES + EXTRA
        used = {each.held.lane for each in (*self.lanes, *self.lost)}
        assert counts["storages_free"] + counts["storages_kept"] + len(used) == LANES + EXTRA
        idle = {kept.storage for kept, _ in self.kept if self.user_of(kept.storage) is None}
        assert counts["storages_kept"] == len(idle)
        assert counts["kept"] == len(self.kept)
        tails = sum(self.tail_nbytes(len(values)) for _, values in self.kept)
        assert counts["kept_nbytes"] == len(idle) * lane_nbytes(self.layers, CONTEXT) + tails


@pytest.mark.parametrize("layers", [HYBRID, FULL, WINDOWS], ids=["hybrid", "full", "windows"])
@pytest.mark.parametrize("seed", range(2))
def test_what_is_kept_never_changes(layers: list[Layer], seed: int) -> None:
    """Every kept prompt, every lane and every count, after each of thousands of operations."""
    walk = Walk(layers, seed)
    for _ in range(1700):
        walk.step()
        walk.check()
    wanted = {"in place", "copied", "evict", "decode", "free"}
    if layers is not FULL:
        wanted.add("refused")
    assert all(walk.seen[each] > 20 for each in wanted), walk.seen
    assert walk.lost, "one lane was never given back"


def test_the_serials_of_what_is_kept_never_come_again() -> None:
    table = LaneTable(FULL, CONTEXT, 1, extra=1)
    serials = []
    for _ in range(4):
        entry = table.publish(table.reserve(3))
        kept = table.keep(entry)
        serials += [kept.serial, table.keep(entry).serial]
        table.evict(kept)
        with pytest.raises(LocalProtocolError, match="not kept, or no longer"):
            table.evict(kept)
        with pytest.raises(LocalProtocolError, match="not kept, or no longer"):
            table.can_reuse(kept, 1)
        table.evict(Kept(serials[-1], 3, kept.storage, kept.storage_nbytes, 0))
        table.free(entry)
    assert len(set(serials)) == 8
    with pytest.raises(LocalProtocolError, match="there are 2 memories"):
        table.evict(Kept(1, 3, 2, 0, 0))


def test_one_copier_call_moves_all_that_an_operation_moves() -> None:
    """So that a device records one event for it; nothing else of a table moves bytes."""
    calls: list[list[Move]] = []

    def copy(moves: Sequence[Move]) -> None:
        calls.append(list(moves))
        copy_now(moves)

    table = LaneTable(HYBRID, CONTEXT, 2, extra=1, copier=copy)
    entry = table.publish(table.reserve(9))
    kept = table.keep(entry)
    assert [target.shape[1] for target, _ in calls.pop()] == [4, 4, 5, 5]
    table.reserve_from(kept, 9, 11)  # into another memory: the entry's is in use
    assert [target.shape[1] for target, _ in calls.pop()] == [2, 2, 9, 9, 3, 3, 9, 9]
    table.free(entry)
    table.reserve_from(kept, 9, 12)
    assert [target.shape[1] for target, _ in calls.pop()] == [1, 1, 2, 2]
    assert not calls


def test_a_failed_copy_leaves_the_lane_and_its_memory_taken() -> None:
    """What was queued may still come: nobody else may have them."""
    fail = False

    def copy(moves: Sequence[Move]) -> None:
        if fail:
            raise DeviceError("the device failed")
        copy_now(moves)

    table = LaneTable(FULL, CONTEXT, 2, extra=1, copier=copy)
    entry = table.publish(table.reserve(9))
    kept = table.keep(entry)
    fail = True
    with pytest.raises(DeviceError):
        table.reserve_from(kept, 9, 11)
    assert table.statistics()["lanes_reserved"] == 1
    with pytest.raises(WouldBlock):
        table.reserve(3)
    table.check_integrity()


def test_no_memory_for_tails_keeps_nothing() -> None:
    given = 0

    def allocate(nbytes: int) -> torch.Tensor:
        nonlocal given
        given += 1
        if given > 2:
            raise Refused("there is no more")
        return host_bytes(nbytes)

    table = LaneTable(HYBRID, CONTEXT, 1, allocate, extra=1)
    entry = table.publish(table.reserve(9))
    with pytest.raises(Refused, match="no more"):
        table.keep(entry)
    assert table.statistics()["kept"] == 0
    table.free(entry)
    table.check_integrity()


def test_a_free_lane_reaches_no_memory() -> None:
    table = LaneTable(HYBRID, CONTEXT, 1)
    lane = table._records[0].lane
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="without storage"):
            _ = lane.storage
        assert all(
            cached.keys.numel() == 0 for cached in lane.cache.layers if cached.keys is not None
        )
        held = table.reserve(4)
        assert lane.storage.nbytes == lane_nbytes(HYBRID, CONTEXT)
        table.free(held)


def test_integrity_is_checked() -> None:
    storages = Storages(FULL, CONTEXT, 2, host_bytes)
    storages.take(0)
    storages.check_integrity([0])
    for wrong in ([], [1], [0, 1]):
        with pytest.raises(LocalProtocolError, match="are in use"):
            storages.check_integrity(wrong)
    with pytest.raises(LocalProtocolError, match="lane 1 uses no memory"):
        storages.leave(1)


@pytest.mark.parametrize(("layers", "num_tokens", "positions"), [(HYBRID, 3, 4 + 5), (FULL, 9, 0)])
def test_bytes_of_tails(layers: Any, num_tokens: int, positions: int) -> None:
    """They count what is held, and are had in whole pages."""
    table = LaneTable(layers, CONTEXT, 1)
    for length in (num_tokens, 20):
        entry = table.publish(table.reserve(length))
        kept = table.keep(entry)
        row = sum(part.row_nbytes for part in PARTS)
        assert kept.nbytes == row * (positions if length == 20 else 2 * 3 if positions else 0)
        assert kept.nbytes <= tails_nbytes(layers, length)
        table.evict(kept)
        table.free(entry)
