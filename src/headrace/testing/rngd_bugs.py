"""Bugs of the RNGD engine, planted one at a time: a scene on a fake card finds each.

How they are written down is told in `headrace.testing.planting`; the instances are scenes of
`headrace.testing.rngd_scenes`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from headrace.backends import rngd_emitter
from headrace.backends.rngd import RngdEngine
from headrace.backends.rngd_emitter import Emitter
from headrace.engine.rngd import card, compiled, program
from headrace.engine.rngd.card import CardExecutor
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.inputs import ChunkInputs
from headrace.engine.rngd.program import LayerProgram
from headrace.errors import HeadraceError
from headrace.testing.fake_furiosa import Fault
from headrace.testing.planting import Mutant, read_mutants
from headrace.testing.rngd_scenes import SCENES, Bench


def hunt(mutant: Mutant, bench: Bench) -> str | None:
    """Play its scene with the bug planted; returns how it was found, None if it survived."""
    with mutant.planted():
        try:
            SCENES[mutant.instance](bench)
        except (HeadraceError, Fault) as exc:
            return f"{type(exc).__name__}: {exc}"
    return None


_BUGS: Final = r"""
[CardExecutor.read]
cells_are_told_when_they_are_there: cells are copied while they are computed
    self._copies.waits_for(self._compute) => pass
cells_are_told_when_they_are_there: the wrong stream waits for cells
    self._copies.waits_for(self._compute) => self._compute.waits_for(self._copies)
cells_are_told_when_they_are_there: the event of a copy is recorded on the other stream
    event = self._copies.queued(host, source, placed) =>
        event = self._compute.queued(host, source, placed)
cells_are_told_when_they_are_there: rows are read one slot early
    placed.narrow(0, first, stop - first) => placed.narrow(0, first - 1, stop - first)
cells_are_told_when_they_are_there: of a whole tensor the first rows are taken
    start = 0 if self._reads == "narrow" else first => start = 0
cells_are_told_when_they_are_there: what is padded is read as if it were not
    if tensor.padded[1:] != tensor.shape[1:]: => if False:
what_is_queued_keeps_its_memory: nothing keeps what a copy writes
    event = self._copies.queued(host, source, placed) => event = self._copies.queued(placed)
what_is_queued_keeps_its_memory: nothing keeps what a copy reads
    event = self._copies.queued(host, source, placed) => event = self._copies.queued(host)
[CardExecutor.place]
cells_are_told_when_they_are_there: nothing keeps what is copied to the card
    self._compute.queued(source, placed) => self._compute.queued(placed)
what_is_queued_is_bounded: what is placed is not bounded
    self._compute.room() => pass
[CardExecutor.zeros]
what_is_queued_keeps_its_memory: memory of zeros is not zeroed
    return self.place(tensor, torch.zeros(tensor.shape, dtype=torch.uint8).to(dtype)) =>
        return self._empty(tensor)
[CardExecutor.run]
cells_are_told_when_they_are_there: copies do not know of the last kernel
    self._compute.queued(*arguments, *results) => pass
what_is_queued_is_bounded: kernels are not bounded
    self._compute.room() => pass
[CardExecutor.wait]
a_cancel_leaves_the_slot_quiet: copies are not drained
    self._copies.drain() => pass
[CardExecutor._check_thread]
another_thread_is_refused: any thread may use a card
    if threading.get_ident() != self._thread: => if False:
[card.shard_axes]
cells_are_told_when_they_are_there: memory is made for no chip
    return [(tensor.split, chips)] => return []
[_Queue.room]
what_is_queued_is_bounded: the bound is not kept
    if len(self._pending) >= MAX_IN_FLIGHT: => if False:
what_is_queued_is_bounded: what is queued is forgotten when there is too much of it
    self._pending[0].event.synchronize() => pass;
what_is_queued_is_bounded: what is waited for is let go before
    self._pending[0].event.synchronize() => self._pending.popleft().event.synchronize(); return;
[_Queue.waits_for]
cells_are_told_when_they_are_there: copies wait for the oldest work only
    other._pending[-1].event.wait(self.stream) => other._pending[0].event.wait(self.stream)
[_Queue.drain]
a_cancel_leaves_the_slot_quiet: draining does not wait
    self.stream.synchronize() => pass
[_Queue.current]
cells_are_told_when_they_are_there: the stream of copies stays the current one
    self._torch.set_stream(before) => pass
[_Read.done]
cells_are_told_when_they_are_there: a read is done at once
    if not self._over and self.executor.passed(self.event): => if not self._over:
cells_are_told_when_they_are_there: rows of a whole tensor are never picked
    if self.host is not self.target: => if False:
[CompiledKernels._compile]
a_failed_compilation_is_not_remembered: the vendor's cache is kept
    vendor.config.cache_context(str(own)), => vendor.config.cache_context(str(self._directory)),
[CompiledKernels._read]
kernels_are_compiled_once: a changed file is taken
    and hashlib.sha256(body).digest() == digest => and digest
[CompiledKernels._path]
kernels_are_compiled_once: kernels of other shapes have the same file
    fusion, text] => fusion]
[CompiledKernels._made]
kernels_are_compiled_once: what was compiled is not written
    _write(path, made) => pass
[Emitter.poll]
cells_are_told_when_they_are_there: what is read is announced at once
    while self._waiting and self._waiting[0].done(): => while self._waiting:
[Emitter.finish]
cells_are_told_when_they_are_there: what is left at the end is not announced
    while self._waiting: => while False:
[Emitter._fill]
cells_are_told_when_they_are_there: cells of the next position are read
    cells.start, cells.stop, target => cells.start + 1, cells.stop + 1, target
cells_are_told_when_they_are_there: only the last read is waited for
    filling.tickets.append( => filling.tickets.clear(); filling.tickets.append(
[_Announced.done]
cells_are_told_when_they_are_there: the first of all reads stands for the others
    if not self.tickets[-1].done(): => if not self.tickets[0].done():
[RngdEngine.prefill_stream]
a_cancel_leaves_the_slot_quiet: a cancelled prefill is not drained
    self._executor.wait() => pass
a_cancel_leaves_the_slot_quiet: only an interrupted prefill is drained
    except BaseException as exc: => except KeyboardInterrupt as exc:
a_failed_copy_is_told: a card that failed is told as any error is
    raise Unquiet(f"copies into the slot may be in flight: {broken}") from exc => raise
[RngdEngine._run]
cells_are_told_when_they_are_there: logits are not waited for
    emitter.wait_for(ticket) => pass
cells_are_told_when_they_are_there: the end is told before the last cells
    emitter.finish() => pass
[LayerProgram.read]
cells_are_told_when_they_are_there: padding's slot is read for a position
    start + 1, stop + 1, => start, stop,
[ChunkInputs.__init__]
prompts_leave_nothing: inputs of another chunk are taken again
    self._placed: dict[tuple[str, tuple[int, ...]], Any] = {} =>
        self._placed = executor.__dict__.setdefault("stale", {})
[program.token_inputs]
cells_are_told_when_they_are_there: padding's slot is used for a position
    positions[: chunk.length] + 1 => positions[: chunk.length]
"""

_PLACES: Final[tuple[type | ModuleType, ...]] = (
    *(CardExecutor, ChunkInputs, CompiledKernels, Emitter, LayerProgram, RngdEngine),
    *(card._Queue, card._Read, rngd_emitter._Announced),
)
_MODULES: Final = {"card": card, "compiled": compiled, "program": program}

MUTANTS: Final = read_mutants(_BUGS, {each.__name__: each for each in _PLACES} | _MODULES)
