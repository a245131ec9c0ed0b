"""Bugs of the ATOM lane: of blocks, casts, mirrors, and of what is flushed when.

How they are written down is told in `headrace.testing.planting`; `headrace.testing.atom_bugs` reads
them.
"""

from __future__ import annotations

from typing import Final

LANE_BUGS: Final = r"""
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
[AtomLane.forget]
a_row_that_never_came_is_missed: what came of the last prompt counts for the next
    np.zeros(rows.num, bool) => each.blocks[rows.block].there if rows.block in each.blocks and
        each.blocks[rows.block].wanted == rows.num else np.zeros(rows.num, bool)
    [AtomLane.end] each.blocks = {} => pass
[AtomLane.begin]
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
    if not block.flushed: => if not block.there.all():
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
"""
