"""Bugs of the ATOM decoder, planted one at a time: a scene on a fake card finds each.

How they are written down is told in `headrace.testing.planting`; the instances are scenes of
`headrace.testing.atom_scenes` and `headrace.testing.atom_fault_scenes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Final

from headrace.backends import atom
from headrace.backends.atom import AtomDecoder
from headrace.engine.atom import blocks, compiled, lane, mirrors, number_format
from headrace.engine.atom.casts import Cast
from headrace.engine.atom.compiled import CompiledDecoder
from headrace.engine.atom.lane import AtomLane
from headrace.errors import HeadraceError
from headrace.testing import atom_fault_scenes, atom_ground, atom_scenes
from headrace.testing.atom_ground import Bench
from headrace.testing.fake_rebellions import Fault
from headrace.testing.planting import Mutant, Plant, read_mutants

SCENES: Final[Mapping[str, Callable[[Bench], None]]] = {
    **atom_scenes.SCENES,
    **atom_fault_scenes.SCENES,
}


def hunt(mutant: Mutant, bench: Bench) -> str | None:
    """Play its scene with the bug planted; returns how it was found, None if it survived.

    A bug may also show as an error that nobody would raise by intent, such as an index beyond a
    list's end.
    """
    with mutant.planted():
        try:
            SCENES[mutant.instance](bench)
        except (HeadraceError, Fault, LookupError, TypeError, ValueError, RuntimeError) as exc:
            return f"{type(exc).__name__}: {exc}"
    return None


_BUGS: Final = r"""
[blocks.window_start]
prompts_are_decoded_as_they_came: a window is anchored at the prompt's start
    max(0, num_tokens - cache.rows) => 0 * num_tokens
prompts_are_decoded_as_they_came: a window begins one position late
    max(0, num_tokens - cache.rows) => max(0, num_tokens - cache.rows + 1)
[blocks.rows_of]
prompts_are_decoded_as_they_came: a window is a ring
    yield Rows(LANE, start - first, start, stop - start) =>
        yield from (Rows(LANE, p % cache.rows, p, 1) for p in range(start, stop))
prompts_are_decoded_as_they_came: a window's rows begin at the end of the block
    yield Rows(LANE, start - first, start, stop - start) =>
        yield Rows(LANE, start - first + max(0, cache.rows - num_tokens), start, stop - start)
a_lane_may_have_fewer_blocks: a window is in the next item's block
    yield Rows(LANE, start - first, => yield Rows(cache.blocks - 1, start - first,
prompts_are_decoded_as_they_came: a block is one row shorter
    divmod(at, cache.rows) => divmod(at, cache.rows - 1)
prompts_are_decoded_as_they_came: blocks go down from the last
    yield Rows(block, row, at, num) => yield Rows(cache.blocks - 1 - block, row, at, num)
prompts_are_decoded_as_they_came: what goes on in the next block is dropped
    at += num => return
prompts_are_decoded_as_they_came: a span begins at its block's first row
    yield Rows(block, row, at, num) => yield Rows(block, 0, at, num)
a_copy_from_outside_is_refused: positions before a window are taken
    if not first <= start < stop <= num_tokens: => if not start < stop <= num_tokens:
a_copy_from_outside_is_refused: positions behind the prompt are taken
    if not first <= start < stop <= num_tokens: => if not first <= start < stop:
[blocks.needed]
a_row_that_never_came_is_missed: the last position needs no row
    window_start(cache, num_tokens), num_tokens, num_tokens =>
        window_start(cache, num_tokens), max(1, num_tokens - 1), num_tokens
[blocks.block_table]
a_lane_may_have_fewer_blocks: a table names blocks that the card has not
    min(at, num_blocks - 1) => at
prompts_are_decoded_as_they_came: a table goes down
    min(at, num_blocks - 1) => num_blocks - 1 - at
[blocks.lane_blocks]
nothing_is_left_of_another_prompt: only the first block is cleared
    if cache.kind == "full" else 1 => if cache.kind == "none" else 1
nothing_is_left_of_another_prompt: the last block is not cleared
    -(-positions // cache.rows) => positions // cache.rows - 1
[Cast.exact]
a_lossy_cast_is_refused: the private format passes for exact
    if self.number_format != "declared": => if False:
a_lossy_cast_is_refused: a format that the runtime converts passes for exact
    if self.number_format != "declared": => if self.number_format == "custom_float16":
a_lossy_cast_is_refused: narrowing passes for exact
    (self.sent, self.declared) in _WIDENING => True
a_lossy_cast_is_refused: widening passes for lossy
    (self.sent, self.declared) in _WIDENING => False
[Cast._store_lossy]
values_are_kept_as_is_said: rounded to the declared dtype before the private format
    target.copy_(number_format.encode(cells)) =>
        target.copy_(number_format.encode(cells.to(DTYPES[self.declared])))
values_are_kept_as_is_said: rounded to bfloat16 before the private format
    target.copy_(number_format.encode(cells)) =>
        target.copy_(number_format.encode(cells.to(torch.bfloat16)))
values_are_kept_as_is_said: patterns are written as float16 values
    target.copy_(number_format.encode(cells)) =>
        target.copy_(cells.to(torch.float16).view(torch.int16))
values_are_kept_as_is_said: patterns are converted as if they were numbers
    target.copy_(number_format.encode(cells)) => target.copy_(cells)
values_are_kept_as_is_said: what the card would round is sent as it is
    if self.number_format == "converted": => if False:
values_are_kept_as_is_said: changed values are not counted
    return number_format.count_changed(cells) => return 0
values_are_kept_as_is_said: changed values of other formats are not counted
    return int(torch.count_nonzero((back != wanted) & ~wanted.isnan())) => return 0
values_are_kept_as_is_said: all values are counted as changed
    return int(torch.count_nonzero((back != wanted) & ~wanted.isnan())) => return wanted.numel()
[Cast.load]
values_are_kept_as_is_said: patterns are read as float16
    number_format.decode(stored, self.sent_dtype) => stored.view(torch.float16).to(self.sent_dtype)
values_are_kept_as_is_said: what is read is in the card's dtype
    found = stored.to(self.sent_dtype) => return stored
a_nan_keeps_its_payload: NaNs are read as any NaN
    if (self.sent, self.declared) != ("bfloat16", "float32"): => if True:
[number_format._encode_float32]
values_are_kept_as_is_said: halves are rounded up
    _DROPPED - 1)) - 1 + odd => _DROPPED - 1))
values_are_kept_as_is_said: mantissas are cut off
    (rebiased + (1 << (_DROPPED - 1)) - 1 + odd) >> _DROPPED => rebiased >> _DROPPED
values_are_kept_as_is_said: signs are lost
    found | (bits >> 16 & 0x8000) => found
[mirrors.make_mirror]
nothing_is_left_of_another_prompt: a mirror is not zeroed
    flat.view(torch.uint8)[:nbytes].zero_() => flat.view(torch.uint8)[:nbytes]
prompts_are_decoded_as_they_came: a mirror begins a float later
    flat = sdk.aligned(-(-nbytes // _CARRIER_NBYTES))\n    if =>
        flat = sdk.aligned(2 + -(-nbytes // _CARRIER_NBYTES))[2:]\n    if False and
prompts_are_decoded_as_they_came: heads and rows of a mirror are turned
    memory.view(stored).view(cache.shape) =>
        memory.view(stored).view(cache.blocks, cache.rows, cache.heads,
        cache.head_dim).transpose(1, 2)
[AtomLane.__init__]
nothing_is_left_of_another_prompt: a new lane is not cleared
    self._clear()  # => pass  #
a_stale_card_is_told: zeros are not checked after the marks
    # what lies in a card's memory at first may be no number\n    self._check_health() =>
a_stale_card_is_told: marks are not checked before the zeros
    self._mark()\n    self._check_health() => self._mark()
a_card_is_warmed_up_first: no card is warmed up
    if verified.warms_up: => if False:
a_card_is_warmed_up_first: each card is warmed up
    if verified.warms_up: => if True:
prompts_are_decoded_as_they_came: all caches have one mirror
    make_mirror(sdk, cache, cast.stored_dtype), =>
        self.__dict__.setdefault("one", {}).setdefault(
        cache.shape, make_mirror(sdk, cache, cast.stored_dtype)),
[AtomLane.begin]
a_row_that_never_came_is_missed: what came of the last prompt counts for the next
    np.zeros(rows.num, bool) => each.blocks[rows.block].there if rows.block in each.blocks and
        each.blocks[rows.block].wanted == rows.num else np.zeros(rows.num, bool)
    [AtomLane.end] each.blocks = {} => pass
nothing_is_left_of_another_prompt: a lane is not cleared
    if self._verified.clears: => if False:
a_block_goes_to_the_card_once: a lane is always cleared
    if self._verified.clears: => if True:
[AtomLane.slid]
what_is_read_is_what_the_card_has: rows that moved on are read
    > 0 => > 1000
what_is_read_is_what_the_card_has: no window is read after decode began
    window_start(self._of(layer, 0).cache, length) > 0 => True
[AtomLane.write]
a_second_attempt_lands_alone: what was flushed stays flushed
    block.there[rows.first : last] = True\n        if block.there.all(): =>
        block.flushed = bool(block.there.all())
        \n        block.there[rows.first : last] = True
        \n        if block.there.all() and not block.flushed:
prompts_are_decoded_as_they_came: cells of a span's first block are written to all
    at = rows.start - start => at = 0
prompts_are_decoded_as_they_came: rows are written one late
    target = each.mirror.rows[rows.block, :, rows.first : last] =>
        target = each.mirror.rows[rows.block, :, rows.first : last].roll(1, 1)
prompts_are_decoded_as_they_came: every block is written over the first one
    target = each.mirror.rows[rows.block, => target = each.mirror.rows[0,
values_are_kept_as_is_said: changed values are not added up
    self.counts["values_changed"] += => self.counts["values_changed"] =
nothing_is_left_of_another_prompt: what a prompt wrote is not noted
    max(each.soiled[rows.block], last) => each.soiled[rows.block]
nothing_is_left_of_another_prompt: what a prompt wrote last is all that is noted
    max(each.soiled[rows.block], last) => min(last, rows.num)
a_row_that_never_came_is_missed: a row counts as all up to it
    block.there[rows.first : last] = True => block.there[:last] = True
a_row_that_never_came_is_missed: a row counts as all of its block
    block.there[rows.first : last] = True => block.there[:] = True
a_block_goes_to_the_card_once: a block goes to the card with each row
    if block.there.all(): => if True:
a_block_goes_to_the_card_once: a block goes as soon as its last row is there
    if block.there.all(): => if block.there[-1]:
prompts_are_decoded_as_they_came: only whole blocks are flushed
    if block.there.all(): => if block.there.all() and block.wanted == each.cache.rows:
    [AtomLane.check_flushed] for each in self._caches: => for each in ():
prompts_are_decoded_as_they_came: a block is flushed before its last rows are written
    self.counts["values_changed"] += each.cast.store(target, cells[:, at : at + rows.num]) =>
        block.there[rows.first : last] = True
        \n        if block.there.all(): self._flush(each, rows.block, block)
        \n        each.cast.store(target, cells[:, at : at + rows.num]); continue
[AtomLane.read]
a_row_that_never_came_is_missed: rows that never came are read
    if not block.there[rows.first : last].all(): => if False:
what_is_read_is_what_the_card_has: what waits in a mirror is not flushed before
    if not block.flushed: => if False:
a_stale_card_is_told: what is read is what was sent
    scratch = self._fetched(each, rows.block, block.wanted) =>
        scratch = each.mirror.rows[rows.block]
what_is_read_is_what_the_card_has: a block's first rows are read
    scratch[:, rows.first : last] => scratch[:, : rows.num]
what_is_read_is_what_the_card_has: blocks are read in the other order
    torch.cat(found, dim=1) => torch.cat(found[::-1], dim=1)
[AtomLane.check_flushed]
a_row_that_never_came_is_missed: a prompt is published unchecked
    for each in self._caches: => for each in ():
a_row_that_never_came_is_missed: keys are checked alone
    for each in self._caches: => for each in self._caches[::2]:
a_failed_flush_publishes_nothing: rows that are there pass for flushed
    block.flushed and block.there.all() => block.there.all()
[AtomLane._check_health]
a_stale_card_is_told: a card's answer is not compared
    if not torch.equal(_bits(landed), _bits(each.mirror.rows[0])): => if False:
a_stale_card_is_told: a card's answer is never asked for
    landed = self._fetched(each, 0, each.cache.rows) => landed = each.mirror.rows[0]
[AtomLane._of]
prompts_are_decoded_as_they_came: keys and values are swapped
    self._caches[2 * layer + part] => self._caches[2 * layer + 1 - part]
prompts_are_decoded_as_they_came: layers are swapped
    self._caches[2 * layer + part] => self._caches[2 * (layer ^ 2) + part]
prompts_are_decoded_as_they_came: only caches of the first layer are found
    self._caches[2 * layer + part] => self._caches[part]
[AtomLane._flush]
nothing_is_left_of_another_prompt: old rows go to the card with a final block
    self._zero_behind(each, number, block.wanted) => pass
parts_of_blocks_are_moved: whole blocks go to a card that takes parts
    block.wanted if self._verified.sub_blocks else each.cache.rows => each.cache.rows
prompts_are_decoded_as_they_came: parts go to a card that takes whole blocks
    block.wanted if self._verified.sub_blocks else each.cache.rows => block.wanted
parts_of_blocks_are_moved: a part is one row short
    block.wanted if self._verified.sub_blocks =>
        max(1, block.wanted - 1) if self._verified.sub_blocks
prompts_are_decoded_as_they_came: each block goes to the first one
    self._compiled.update(each.cache, each.mirror, number, rows) =>
        self._compiled.update(each.cache, each.mirror, 0, rows)
a_stale_card_is_told: nothing is read back
    if self._reads_back: => if False:
a_block_goes_to_the_card_once: everything is read back
    if self._reads_back: => if True:
a_stale_card_is_told: what is read back is not compared
    if not torch.equal(_bits(landed), _bits(sent)): => if False:
[AtomLane._zero_behind]
nothing_is_left_of_another_prompt: the first row behind a prompt is not zeroed
    wanted : each.soiled[number]] = 0 => wanted + 1 : each.soiled[number]] = 0
prompts_are_decoded_as_they_came: the last row of a prompt is zeroed
    wanted : each.soiled[number]] = 0 => max(0, wanted - 1) : each.soiled[number]] = 0
nothing_is_left_of_another_prompt: only the next block is zeroed
    each.mirror.rows[number, :, wanted => each.mirror.rows[number - 1, :, wanted
[AtomLane._fetched]
a_stale_card_is_told: a block is fetched into its mirror
    scratch = self._scratch[key] => scratch = each.mirror
what_is_read_is_what_the_card_has: caches of other shapes have the same scratch
    key = (each.cache.shape, each.cast.stored_dtype) => key = (each.cast.stored_dtype,)
parts_of_blocks_are_moved: whole blocks are fetched from a card that gives parts
    wanted if self._verified.sub_blocks else each.cache.rows => each.cache.rows
[AtomLane._clear]
nothing_is_left_of_another_prompt: a clear sends what is in the mirrors
    self._zero_behind(each, number, 0) => pass
nothing_is_left_of_another_prompt: only keys are cleared
    for each in self._caches: => for each in self._caches[::2]:
nothing_is_left_of_another_prompt: clears are not counted
    self.counts["clears"] += 1 => pass
[AtomLane._count_flush]
a_block_goes_to_the_card_once: flushes are not counted
    self.counts["flushes"] += 1 => pass
a_block_goes_to_the_card_once: bytes of one head are counted
    cache.heads * cache.head_dim => cache.head_dim
[CompiledDecoder.__init__]
prompts_are_decoded_as_they_came: no mask is given
    self._masked = bool(self.config.use_attention_mask) => self._masked = False
a_lane_may_have_fewer_blocks: a lane is longer than its blocks
    min([longest, *(each.blocks * each.rows for each in full)]) => longest
[CompiledDecoder.decode]
prompts_are_decoded_as_they_came: no tables are given
    dict(self._tables) => {}
prompts_are_decoded_as_they_came: the table of blocks is missing
    dict(self._tables) => {"local_block_tables": self._tables.get("local_block_tables")}
prompts_are_decoded_as_they_came: no position ids are given
    given["position_ids"] = torch.tensor([[position]], dtype=torch.int32) => pass
prompts_are_decoded_as_they_came: position ids are one behind
    given["position_ids"] = torch.tensor([[position]] =>
        given["position_ids"] = torch.tensor([[position - 1]]
prompts_are_decoded_as_they_came: positions begin at one
    cache_position=torch.tensor([[position]] => cache_position=torch.tensor([[position + 1]]
[CompiledDecoder._mask]
prompts_are_decoded_as_they_came: a mask is one short
    : position + 1] = 1 => : position] = 1
prompts_are_decoded_as_they_came: a mask is one long
    : position + 1] = 1 => : position + 2] = 1
prompts_are_decoded_as_they_came: a mask is of another dtype
    dtype=self.config.dtype => dtype=torch.int64
[CompiledDecoder._row]
prompts_are_decoded_as_they_came: logits are not copied
    .to(torch.float32, copy=True) => .to(torch.float32)
[CompiledDecoder._block_tables]
a_lane_may_have_fewer_blocks: the window of another item is decoded from
    torch.tensor([[LANE]], dtype=torch.int16) => torch.tensor([[LANE + 1]], dtype=torch.int16)
[CompiledDecoder.check_thread]
another_thread_is_refused: any thread may call
    if threading.get_ident() != self._thread: => if False:
[CompiledDecoder._enter]
a_call_within_a_call_is_refused: a call within another one is made
    if self._inside: => if False:
[CompiledDecoder.update]
a_block_goes_to_the_card_once: a block goes twice
    self._runtime._update_kv_cache(mirror.host, block, 0, rows, cache.name) =>
        [self._runtime._update_kv_cache(mirror.host, block, 0, rows, cache.name) for _ in "xx"]
[AtomDecoder.__init__]
a_lossy_cast_is_refused: casts are not checked
    _check_casts(lane.casts, lossy=lossy) => pass
values_are_kept_as_is_said: a lossy decoder says that it reads back
    reads_back=exact => reads_back=True
[AtomDecoder.reserve]
what_is_stale_is_refused: the lane is given twice
    if self._held is not None: => if False:
what_is_stale_is_refused: a serial comes again
    self._serial += 1 => self._serial = 1
what_is_stale_is_refused: an empty prompt is taken
    1 <= num_tokens => 0 <= num_tokens
what_is_stale_is_refused: a prompt that is too long is taken
    <= longest => <= longest + 1
what_is_stale_is_refused: a closed decoder reserves
    self._open() => pass
a_failed_clear_keeps_the_lane: a lane that was not cleared is free
    raise ReserveFailed(f"the lane was not cleared: {exc}", reservation) from exc =>
        self._held = None; raise
a_failed_clear_keeps_the_lane: a lane that was not cleared is given
    raise ReserveFailed(f"the lane was not cleared: {exc}", reservation) from exc => pass
[AtomDecoder.begin_import]
what_is_stale_is_refused: imports go on after publishing
    self._check(reservation, Reservation) => self._open()
a_copy_from_outside_is_refused: copies are checked as they are made
    self._check_copy(copy, slot, reservation.num_tokens)\n    for copy in copies: =>
        pass\n    for copy in copies:\n        self._check_copy(copy, slot, reservation.num_tokens)
prompts_are_decoded_as_they_came: of an import the first copy is made
    self._lane.write(copy.layer, copy.part, copy.start, cells) =>
        self._lane.write(copy.layer, copy.part, copy.start, cells); break
prompts_are_decoded_as_they_came: cells are flushed again with each step
    return Done() => self._compiled.lane = self._lane; return Done()
    [CompiledDecoder.decode] given: dict =>
        each = self.lane._caches[0]
        ; self.update(each.cache, each.mirror, 0, each.cache.rows); given: dict
[AtomDecoder.read]
a_copy_from_outside_is_refused: any layer is read
    self._part(copy) => pass
what_is_stale_is_refused: anyone may read
    self._check(held, type(held)) => pass
what_is_read_is_what_the_card_has: what moved on is read
    if self._decoded and self._lane.slid => if False and self._lane.slid
what_is_read_is_what_the_card_has: a long prompt's window is never read
    if self._decoded and self._lane.slid => if self._lane.slid
what_is_read_is_what_the_card_has: layouts are mixed up
    if layout == "head_major" => if layout == "token_major"
[AtomDecoder.publish]
a_row_that_never_came_is_missed: a prompt is published as it is
    self._lane.check_flushed() => pass
prompts_are_decoded_as_they_came: the steps of the last prompt count for the next
    self._held, self._decoded = entry, 0 => self._held = entry
    [AtomDecoder.free] self._held, self._decoded = None, 0 => self._held = None
[AtomDecoder.free]
what_is_stale_is_refused: anyone may free
    self._check(held, type(held)) => pass
what_is_stale_is_refused: nothing is freed
    self._held, self._decoded = None, 0 => pass
[AtomDecoder.decode_step]
what_is_stale_is_refused: an entry is taken twice
    if len(active) > 1: => if False:
what_is_stale_is_refused: what is not published decodes
    self._check(entry, Entry) => pass
what_is_stale_is_refused: a full lane goes on
    if position >= self._manifest.max_positions: => if False:
what_is_stale_is_refused: any token is fed
    if not 0 <= token < self._manifest.vocab_size: => if False:
prompts_are_decoded_as_they_came: each token is fed at the same position
    self._decoded += 1 => pass
a_failed_step_is_told: a step counts before it is made
    row = compiled.decode(token, position)[:
        self._manifest.vocab_size]\n        self._decoded += 1 =>
        self._decoded += 1; row = compiled.decode(token, position)[: self._manifest.vocab_size]
[AtomDecoder._open]
another_thread_is_refused: another thread may import
    self._compiled.check_thread("a call") => pass
[AtomDecoder._check]
what_is_stale_is_refused: a reservation is good once it is published
    type(self._held) is not kind or self._held != held =>
        (self._held is None or self._held.serial != held.serial)
what_is_stale_is_refused: one prompt's reservation is another's
    type(self._held) is not kind or self._held != held => type(self._held) is not kind
[AtomDecoder._part]
a_copy_from_outside_is_refused: layers are counted from the end
    if not 0 <= copy.layer < len(layers): => if copy.layer >= len(layers):
a_copy_from_outside_is_refused: parts are counted from the end
    if not 0 <= copy.part < len(layer.parts): => if copy.part >= len(layer.parts):
[AtomDecoder._check_copy]
a_copy_from_outside_is_refused: copies reach past the slot
    slot.buffer.nbytes) => 1 << 40)
a_copy_from_outside_is_refused: positions are not checked
    self._lane.check_rows(copy.layer, copy.part, copy.start, copy.stop) => pass
[atom._check_casts]
a_lossy_cast_is_refused: what is lossy is always allowed
    if bad and not lossy: => if False:
[atom._manifest]
a_lane_may_have_fewer_blocks: the context is what the graphs were compiled for
    max_positions=context => max_positions=compiled.max_positions
[atom.decoder_on]
a_stale_card_is_told: read_back is not passed on
    reads_back=options.read_back => reads_back=False
"""

_PLACES: Final[tuple[type | ModuleType, ...]] = (Cast, CompiledDecoder, AtomLane, AtomDecoder)
_MODULES: Final = {
    "blocks": blocks,
    "mirrors": mirrors,
    "number_format": number_format,
    "atom": atom,
}


def _everywhere(plant: Plant) -> Iterator[Plant]:
    """A function's plant is needed in each module that imported it."""
    if not isinstance(plant.where, ModuleType):
        yield plant
        return
    function = getattr(plant.where, plant.name)
    for module in (*_MODULES.values(), atom_ground, compiled, lane):
        if getattr(module, plant.name, None) is function:
            yield replace(plant, where=module)


MUTANTS: Final = tuple(
    replace(mutant, plants=tuple(each for plant in mutant.plants for each in _everywhere(plant)))
    for mutant in read_mutants(_BUGS, {each.__name__: each for each in _PLACES} | _MODULES)
)
