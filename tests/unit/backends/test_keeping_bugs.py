"""Small bugs planted one at a time into what keeps entries and goes on from them: each is found.

An instance is a scene of this module. How bugs are written is told in `headrace.testing.planting`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from headrace.backends.keeping import ContinuingEngine
from headrace.backends.lane_table import LaneTable
from headrace.backends.storages import Storages
from headrace.backends.torch import TorchEngine
from headrace.engine import own_cache, pieces
from headrace.engine.lanes import Lane
from headrace.engine.own_cache import OwnCache
from headrace.engine.prefill import TakenCache
from headrace.testing.planting import Mutant, read_mutants
from tests.unit.backends import test_kept, test_storages
from tests.unit.engine import test_own_cache, test_pieces

BUGS: Final = r"""
[Storages.take]
walk: a memory that a lane uses is free
    if memory.is_free: => if not memory.kept:
walk: a memory with something kept in it is free
    if memory.is_free: => if memory.lane is None:
walk: a lane takes a memory and does not say so
    memory.lane = lane => pass
[Storages.take_over]
full: a memory is taken over though longer prompts are kept in it
    or any(num_tokens > positions for num_tokens in others) =>
walk: a memory is taken over from the lane that decodes in it
    memory.lane is not None or =>
full: rows of the prompt's own end are overwritten
    num_tokens > positions for => num_tokens > kept.num_tokens for
walk: a memory is never taken over
    memory.lane is not None => True
[Storages.leave]
walk: what is kept goes with the lane
    self._used_by(lane).lane = None =>
        memory = self._used_by(lane); memory.lane = None; memory.kept.clear()
walk: a memory is never left
    .lane = None =>
[Storages.evict]
walk: all of a memory goes with one prompt
    del self._memory(kept).kept[kept.serial] => self._memory(kept).kept.clear()
walk: the lane loses its memory with what is evicted from it
    del self._memory(kept).kept[kept.serial] =>
        del self._memory(kept).kept[kept.serial]; self._memory(kept).lane = None
serials: what is not kept can be evicted
    self._tails(kept)\n    del self._memory(kept).kept[kept.serial] =>
        self._memory(kept).kept.pop(kept.serial, None)
[Storages.can_reuse]
refused: sliding layers are not looked at
    if isinstance(layer.kind, Sliding) => if False
refused: positions past the prompt can be reused
    1 <= positions <= kept.num_tokens => positions
[Storages.rows]
walk: rows of a window are taken from one place on
    start - first : stop - first => start - first : stop - first + 1
walk: rows of a window are taken from the memory
    if layer.index in tails.rows: => if False:
[Storages.keep]
serials: serials come again
    self._last_serial += 1 => self._last_serial = memory.number
walk: the bytes of tails are not counted
    memory.storage.nbytes, nbytes => memory.storage.nbytes, 0
[Storages.new_tails]
walk: the parts of a tail lie over each other
    at += align(nbytes) => pass
[LaneTable.reserve_from]
walk: sliding rows are not brought back in place
    (in_place and not isinstance(layer.kind, Sliding)) => in_place
walk: full rows are not copied into another memory
    (in_place and not isinstance(layer.kind, Sliding)) =>
        not isinstance(layer.kind, Sliding)
full: full rows move in place
    or (in_place and not isinstance(layer.kind, Sliding)) =>
walk: one of a layer's parts is brought back
    enumerate(sources) => enumerate(sources[:1])
walk: anything can be reused
    not self.can_reuse(kept, positions) or =>
[LaneTable.keep]
walk: tails are filled with nothing
    self._copier( => list(
decoded: what was decoded is kept
    lane.length != entry.num_tokens => False
[LaneTable.free]
walk: a free lane keeps its memory
    self._storages.leave(held.lane) => pass
no-memory: a free lane still reaches its memory
    record.lane.leave() => pass
[LaneTable._target]
over: what is kept can be imported over
    copy.start < record.kept_positions => False
[LaneTable._reserved]
over: nobody remembers what came from a kept entry
    record.kept_positions = kept_positions => pass
[LaneTable.seed]
continued: the seed of a window begins one row early
    positions - needed_rows(layer, positions) =>
        max(0, positions - needed_rows(layer, positions) - 1)
continued: a seed is what is kept at its beginning
    layer, start, positions) => layer, start - start, positions - start)
[Lane.use]
walk: one layer stays where it was
    zip(self._rows, storage.parts, strict=True) =>
        list(zip(self._rows, storage.parts, strict=True))[:-1]
[ContinuingEngine._seed]
computes: it computes all
    self._seed_of(self._kept, start) => None
forgets: what to go on from is left out where all is asked for
    self._kept is None => self._kept is None or not start
[ContinuingEngine.continue_from]
computes: it is not told
    self._kept = kept => pass
[TorchEngine._run]
own: what the engine computed is never kept
    self._own_cache.put => len; (lambda *_: None)
withdrawn: what was withdrawn is kept
    keep=computed.append if self._keeps else None =>
        keep=lambda states: self._own_cache.put(
        tokens, options.cuts, options.prefill_chunk, states)
[OwnCache.find]
pieces: pieces are not compared
    same and key => key
pieces: a run that was not cut there serves
    key.pieces[: len(before)] == before and before[-1][1] == start =>
        key.pieces[: len(before) - 1] == before[:-1]
own-tokens: tokens are not compared
    same and key.tokens.startswith(wanted.tokens[: start * array("I").itemsize]) => same
own-tokens: all but the last token are compared
    wanted.tokens[: start * => wanted.tokens[: (start - 1) *
lru: a use does not make it the latest
    self._kept.move_to_end(key) => pass
[OwnCache.put]
lru: the latest goes first
    popitem(last=False) => popitem(last=True)
lru: the bound is not kept
    while self._nbytes > self._capacity_nbytes: => while False:
lru: one too large drives all out
    if seed.nbytes > self._capacity_nbytes: => if False:
once: bytes of what is replaced are counted twice
    (old.nbytes if old is not None else 0) => 0
[own_cache.shortened]
sliding: rows before a window's are made up
    if start < 0 or => start = max(0, start)\n        if
pieces: a seed is the end of what is kept
    start:stop], states[1] => -needed_rows(layer, num_tokens):], states[1]
[TakenCache._start_from]
seeded: a sliding layer does not know how long it is
    kept.cumulative_length = seed.num_tokens => pass
seeded: keys and values are mixed up
    kept.keys, kept.values = keys, values => kept.keys, kept.values = values, keys
[TakenCache._drop]
chain: nothing is kept at the end
    self.last and not self._keep => self.last
[TakenCache.seed]
chain: a window's rows are one too few
    rows = needed_rows(layer, num_tokens) => rows = max(1, needed_rows(layer, num_tokens) - 1)
[pieces.pieces]
pieces-of: the chunk goes on over a cut
    ranges += [(at, min(at + step, last)) for at in range(first, last, step)] =>
        ranges += [(at, min(at + step, last)) for at in range(first - first % step, last, step)]
pieces-of: cuts are left out
    edges = [0, *cuts, num_tokens] => edges = [0, num_tokens]
cuts: cuts are not checked
    stop <= start => False
"""

PLACES: Final[dict[str, Any]] = {
    "pieces": pieces,
    "own_cache": own_cache,
    **{
        each.__name__: each
        for each in (
            Storages,
            LaneTable,
            Lane,
            ContinuingEngine,
            TorchEngine,
            OwnCache,
            TakenCache,
        )
    },
}
"""What the text above names."""

MUTANTS: Final = read_mutants(BUGS, PLACES)


def walked(layers: Any) -> None:
    for seed in range(3):
        walk = test_storages.Walk(layers, seed)
        for _ in range(400):
            walk.step()
            walk.check()


def withdrawn() -> None:
    with pytest.MonkeyPatch.context() as patched:
        test_own_cache.test_what_was_withdrawn_or_failed_leaves_nothing(patched)


def computes() -> None:
    with pytest.MonkeyPatch.context() as patched:
        test_kept.test_it_computes_only_what_comes_after(patched)


def own() -> None:
    with pytest.MonkeyPatch.context() as patched:
        test_own_cache.test_a_hit_gives_the_bits_of_a_miss("gemma3", patched)


def pieces_agree() -> None:
    rows: Any = _cases(test_own_cache.test_pieces_must_agree_up_to_the_start)
    for row in rows:
        test_own_cache.test_pieces_must_agree_up_to_the_start(*row)


def pieces_of() -> None:
    for chunk, cuts, wanted in _cases(test_pieces.test_pieces):
        assert pieces.pieces(20, chunk, cuts) == wanted


def cuts_are_checked() -> None:
    for (cuts,) in ((cuts,) for cuts in _cases(test_pieces.test_cuts_that_are_none_of_the_prompt)):
        with pytest.raises(Exception, match="cuts at"):
            pieces.pieces(20, 8, cuts)


def _cases(test: Any) -> list[Any]:
    """What a test is run with."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return list(mark.args[1])


def sliding() -> None:
    for num_tokens, start in ((9, 8), (9, 4), (4, 3), (5, 2)):
        test_own_cache.test_a_sliding_layer_without_the_rows_is_a_miss(num_tokens, start)


SCENES: Final[dict[str, Callable[[], None]]] = {
    "walk": lambda: walked(test_storages.HYBRID),
    "full": lambda: walked(test_storages.FULL),
    "serials": test_storages.test_the_serials_of_what_is_kept_never_come_again,
    "no-memory": test_storages.test_a_free_lane_reaches_no_memory,
    "refused": lambda: test_kept.test_rows_of_a_window_that_are_gone_are_refused("gemma3"),
    "decoded": test_kept.test_only_what_was_not_decoded_can_be_kept,
    "over": test_kept.test_what_is_kept_cannot_be_imported_over,
    "continued": lambda: test_kept.test_a_longer_prompt_goes_on_from_a_kept_one("gemma3", True),
    "computes": computes,
    "forgets": lambda: test_kept.test_an_attempt_that_ended_otherwise_forgets_it_too(
        "asked for all"
    ),
    "own": own,
    "withdrawn": withdrawn,
    "pieces": pieces_agree,
    "own-tokens": test_own_cache.test_a_prompt_serves_one_that_goes_on_from_its_end,
    "lru": test_own_cache.test_the_oldest_use_goes_first_and_the_bytes_are_bounded,
    "once": test_own_cache.test_the_same_computation_is_kept_once,
    "sliding": sliding,
    "seeded": lambda: test_pieces.test_a_seeded_run_is_a_run_from_zero("gemma3", 7),
    "chain": lambda: test_pieces.test_seeds_chain("gemma3"),
    "pieces-of": pieces_of,
    "cuts": cuts_are_checked,
}


@pytest.mark.parametrize("name", sorted(SCENES))
def test_without_a_bug_a_scene_passes(name: str) -> None:
    SCENES[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.text for mutant in MUTANTS])
def test_each_bug_is_found(mutant: Mutant) -> None:
    """By a check that fails or refuses, not by a plant that cannot be made."""
    with mutant.planted():
        try:
            SCENES[mutant.instance]()
        except (NameError, SyntaxError):
            raise
        except BaseException:  # pytest's own failures are no Exception
            return
    raise AssertionError(f"survived: {mutant.text}")
