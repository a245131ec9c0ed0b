"""The ground of the scenes on a fake ATOM card: decoders, prompts, and what is right for them.

What is right is worked out without the engine: cells are put where they belong into the memory of
another fake card, in its number format, and the fake's own decoder goes on from them.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headrace.backends.atom import AtomDecoder, Options, decoder_on
from headrace.backends.base import Entry, Reservation, SlotView
from headrace.engine.atom import number_format
from headrace.engine.atom.record import Verified
from headrace.engine.tensors import DTYPES, as_bytes, over_region
from headrace.errors import HeadraceError, LocalProtocolError
from headrace.geometry import Layout
from headrace.ids import Span
from headrace.plan import Copy, Plan, compile_plan
from headrace.testing.atom_cases import (
    BLOCK,
    CONTEXT,
    FED,
    ODD,
    Case,
    Cells,
    Cut,
    Family,
    Reusing,
    held_of,
    part_of,
    step,
)
from headrace.testing.fake_rebellions import FakeRebellions, compile_fake
from headrace.testing.fake_rebellions.compiled import CacheMeta
from headrace.testing.fake_rebellions.memory import from_patterns, to_patterns
from headrace.testing.fake_rebellions.model import FakeModel


class Unkept(HeadraceError):
    """What a scene is to show does not hold."""


def check(good: bool, text: str) -> None:
    if not good:
        raise Unkept(text)


def refused(
    what: str, act: Callable[[], object], kind: type[HeadraceError] = LocalProtocolError
) -> None:
    """Raise Unkept unless `act` raises this kind of error and no other."""
    told = said_by(act)
    check(type(told) is kind, f"{what}: told was {told!r}")


def said_by(act: Callable[[], object]) -> HeadraceError | None:
    """What `act` raises."""
    try:
        act()
    except HeadraceError as exc:
        return exc
    return None


@dataclass(frozen=True)
class Right:
    """cells: as they are kept, in float32. rows: logits of `FED`. changed: values that are not as
    they were sent.
    """

    cells: Cells
    rows: tuple[bytes, ...]
    changed: int


class Slot:
    """Cells of one prompt where a source would have left them."""

    def __init__(self, decoder: AtomDecoder, layout: Layout, cells: Cells, num_tokens: int) -> None:
        self.plan: Plan = compile_plan(decoder.manifest(), layout, num_tokens, CONTEXT)
        self.memory = bytearray(self.plan.slot.nbytes)
        self._exported = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)
        self.view = SlotView(memoryview(self.memory), ctypes.addressof(self._exported), layout)
        for copy in self.copies():
            given = cells[copy.layer, copy.part]
            first = num_tokens - given.shape[1]
            self.cells(copy).copy_(given[:, copy.start - first : copy.stop - first])

    def copies(self, span: Span | None = None) -> list[Copy]:
        return self.plan.copies(span or self.plan.whole())

    def cells(self, copy: Copy) -> torch.Tensor:
        """The place of a copy's cells, [heads, positions, head_dim]."""
        part = self.plan.layers[copy.layer].parts[copy.part]
        layout = self.plan.layout
        return over_region(self.view.buffer, copy.source, part, copy.stop - copy.start, layout)

    def pieces(self, cut: Cut) -> list[list[Copy]]:
        """All copies, import by import."""
        num_layers, num_tokens = len(self.plan.layers), self.plan.num_tokens
        layers = [self.copies(Span(at, at + 1, 0, num_tokens)) for at in range(num_layers)]
        steps = [
            self.copies(Span(0, num_layers, at, min(at + 5, num_tokens)))
            for at in range(0, num_tokens, 5)
        ]
        pieces = {
            "whole": [self.copies()],
            "layers": layers,
            "backwards": layers[::-1],
            "positions": steps,
            "late_first": steps[::-1],
        }[cut]
        return [piece for piece in pieces if piece]


class Bench:
    """Small models of two families, and what is right for them."""

    def __init__(self, llama: Path, hybrid: Path) -> None:
        """Directories of checkpoints; the second has sliding layers of 16 and full ones."""
        self._checkpoints: Mapping[Family, Path] = {"llama": llama, "hybrid": hybrid}
        self._kept = tempfile.TemporaryDirectory(prefix="headrace-fake-compiled-")
        self.compiled = lru_cache(maxsize=None)(self._compiled)
        self.right = lru_cache(maxsize=None)(self._right)
        self._reference = lru_cache(maxsize=None)(self._loaded)
        for dtype in (
            torch.float32,
            torch.float16,
            torch.bfloat16,
        ):  # tables that a bug must not get into
            number_format.count_changed(torch.zeros(1, dtype=dtype))
            number_format.decode(torch.zeros(1, dtype=torch.int16), dtype)

    def close(self) -> None:
        self._kept.cleanup()

    @contextmanager
    def decoder(
        self,
        case: Case,
        *,
        clears: bool = False,
        warms_up: bool = False,
        lossy: bool = False,
        read_back: bool = False,
        context: int | None = None,
        **knobs: Any,
    ) -> Iterator[tuple[AtomDecoder, Reusing]]:
        """A decoder on a fake card of its own; nothing of the card was misused at the end."""
        fake = Reusing(number_format=case.number_format, **knobs)
        found = Verified(case.number_format, fake.sub_blocks, clears, warms_up)
        options = Options(
            model=str(self._checkpoints[case.family]),
            compiled=str(self.compiled(case)),
            dtype=case.sent,
            lossy=lossy,
            read_back=read_back,
            context=context,
        )
        decoder = decoder_on(fake.sdk(), found, options)
        try:
            yield decoder, fake
            check(not fake.card.faults, f"the card was misused: {fake.card.faults[:1]}")
        finally:
            with suppress(HeadraceError):
                decoder.close()

    def cells(self, case: Case, num_tokens: int, seed: int) -> Cells:
        """What a source sends of a prompt: no two cells alike; some values are kept in any format,
        and some are odd.
        """
        draw = torch.Generator().manual_seed(1000 * num_tokens + seed)
        sent: Cells = {}
        for meta in self._metas(case):
            shape = meta.shape[1], held_of(meta, num_tokens), meta.shape[3]
            values = torch.randn(shape, generator=draw)
            values[:, ::2] = values[:, ::2].to(torch.bfloat16).to(torch.float32)
            values[-1, -1, : len(ODD)] = torch.tensor(ODD)
            sent[meta.layer_index, part_of(meta)] = values.to(DTYPES[case.sent])
        return sent

    def slot(
        self,
        decoder: AtomDecoder,
        case: Case,
        num_tokens: int,
        seed: int = 0,
        layout: Layout = "head_major",
    ) -> Slot:
        return Slot(decoder, layout, self.cells(case, num_tokens, seed), num_tokens)

    def _right(self, case: Case, num_tokens: int, seed: int = 0) -> Right:
        fake, model = self._reference(case)
        sent = self.cells(case, num_tokens, seed)
        kept: Cells = {}
        changed = 0
        for meta in self._metas(case):
            key = (meta.layer_index, part_of(meta))
            given = sent[key].to(torch.float32)
            kept[key] = self._placed(fake, case, meta, given, num_tokens)
            changed += int((kept[key] != given).sum())
        rows = tuple(
            step(model, token, num_tokens + at).numpy().tobytes() for at, token in enumerate(FED)
        )
        return Right(kept, rows, changed)

    def _placed(
        self, fake: FakeRebellions, case: Case, meta: CacheMeta, given: torch.Tensor, n: int
    ) -> torch.Tensor:
        """Put a cache's cells where they belong; returns what is left of them."""
        memory, full = fake.card.memory, meta.layer_type == "full_attention"
        first = n - given.shape[1]
        at = [divmod(p, meta.shape[2]) if full else (0, p - first) for p in range(first, n)]
        where = [block for block, _ in at], [row for _, row in at]
        if case.number_format == "declared":
            states = given.to(DTYPES[case.declared])
            memory.scatter(meta.name, *where, states)
            return states.to(torch.float32)
        memory.scatter(meta.name, *where, given)
        return from_patterns(to_patterns(given))

    def _metas(self, case: Case) -> Sequence[CacheMeta]:
        metas: Sequence[CacheMeta] = self._reference(case)[1].rbln_config.cache_metas
        return metas

    def _loaded(self, case: Case) -> tuple[FakeRebellions, FakeModel]:
        fake = FakeRebellions(number_format=case.number_format)
        return fake, fake.load(str(self.compiled(case)), 0)

    def _compiled(self, case: Case) -> Path:
        directory = Path(tempfile.mkdtemp(dir=self._kept.name))
        compile_fake(
            self._checkpoints[case.family],
            directory,
            max_seq_len=CONTEXT,
            attn_impl=case.attention,
            partition_len=BLOCK if case.attention == "flash_attn" else None,
            batch_size=case.batch,
            dtype=case.declared,
            num_blocks=case.blocks,
        )
        return directory


def imported(decoder: AtomDecoder, slot: Slot, cut: Cut = "whole") -> Reservation:
    """A reservation in which a prompt has landed."""
    reservation = decoder.reserve(slot.plan.num_tokens)
    bring(decoder, reservation, slot, cut)
    return reservation


def bring(decoder: AtomDecoder, reservation: Reservation, slot: Slot, cut: Cut = "whole") -> None:
    for copies in slot.pieces(cut):
        check(decoder.begin_import(reservation, slot.view, copies).done(), "a fence is not done")


def decode(decoder: AtomDecoder, entry: Entry) -> tuple[bytes, ...]:
    """The rows of `FED`, looked at after the last step."""
    rows = [decoder.decode_step([(entry, token)])[0] for token in FED]
    return tuple(bytes(row.cast("B")) for row in rows)


def serve(
    bench: Bench,
    decoder: AtomDecoder,
    fake: FakeRebellions,
    case: Case,
    num_tokens: int,
    seed: int = 0,
    layout: Layout = "head_major",
    cut: Cut = "whole",
) -> None:
    """Import a prompt, decode it and free it; all of it is right, and decode is left alone."""
    slot = bench.slot(decoder, case, num_tokens, seed, layout)
    entry = decoder.publish(imported(decoder, slot, cut))
    mark = len(fake.card.log)
    rows = decode(decoder, entry)
    calls = {call.call for call in fake.card.log[mark:]}
    check(calls == {"decode"}, f"{case}: between its steps there were {calls}")
    right = bench.right(case, num_tokens, seed).rows
    check(rows == right, f"{case}, {num_tokens} tokens, {layout}, {cut}: other logits")
    decoder.free(entry)


def check_copies(
    decoder: AtomDecoder, held: Reservation | Entry, slot: Slot, copies: Sequence[Copy]
) -> None:
    """What is read of `copies` is what the slot has, in its layout and in the other one."""
    layouts: tuple[Layout, ...] = ("head_major", "token_major")
    for copy in copies:
        cells = slot.cells(copy)
        for layout in layouts:
            wanted = cells if layout == "head_major" else cells.permute(1, 0, 2)
            read = bytes(decoder.read(held, layout, copy))
            check(read == bytes(as_bytes(wanted)), f"{copy}: other bytes are read")


def check_cells(bench: Bench, decoder: AtomDecoder, held: Reservation, case: Case, n: int) -> None:
    """What is read of a prompt of seed 1 is what is right, in the dtype that was sent."""
    slot = bench.slot(decoder, case, n, 1)
    for copy in slot.copies():
        right = bench.right(case, n, 1).cells[copy.layer, copy.part].to(DTYPES[case.sent])
        read = bytes(decoder.read(held, "head_major", copy))
        check(read == bytes(as_bytes(right)), f"{case}: other values are read")


def check_rest(fake: FakeRebellions, num_tokens: int, blocks: int | None = None) -> None:
    """The card has zeros behind a prompt: in its first `blocks` of full attention, or in all."""
    memory = fake.card.memory
    for name in memory.names:
        num, _, rows, _ = memory.meta(name).shape
        if rows * num == CONTEXT and blocks is not None:
            num = blocks
        at = [divmod(row, rows) for row in range(num_tokens, num * rows)]
        rest = memory.gather(name, [block for block, _ in at], [row for _, row in at])
        check(not rest.count_nonzero(), f"{name} holds something behind {num_tokens} positions")
