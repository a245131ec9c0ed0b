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
from headrace.testing.atom_lane_bugs import LANE_BUGS
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
[CompiledDecoder.__init__]
prompts_are_decoded_as_they_came: no mask is given
    self._masked = bool(self.config.use_attention_mask and self.config.use_position_ids) =>
        self._masked = False
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
[AtomDecoder.forget_imports]
a_second_attempt_lands_alone: an attempt goes on where another ended
    self._lane.forget() => pass
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
    for mutant in read_mutants(
        LANE_BUGS + _BUGS, {each.__name__: each for each in _PLACES} | _MODULES
    )
)
