"""The index of kept prompts: found by tokens and schedule, bounded in bytes, least used first."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from headrace.backends.base import Kept
from headrace.errors import LocalProtocolError
from headrace.geometry import Full
from headrace.messages import MAX_CUTS
from headrace.runtime.prefix import (
    Found,
    KeptPrompt,
    PrefixIndex,
    Schedule,
    common_positions,
)
from tests.unit.protocol.builders import make_plan

STORAGE = 1000
ROWS = 60  # more than the rows and tokens of the few prompts of one test
PLAN = make_plan(4, Full())


def schedule(chunk: int = 0, cuts: tuple[int, ...] = (), maker: str = "torch {}") -> Schedule:
    return Schedule("model", "float32", maker, chunk, cuts)


class Decoder:
    """What a decoder counts as kept: idle memories once, and each tail."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self.busy: set[int] = set()  # memories that a lane uses
        self._serial = 0

    def keep(self, tokens: array[int], storage: int, tail: int = 10) -> Kept:
        self._serial += 1
        kept = Kept(self._serial, len(tokens), storage, STORAGE, tail)
        self.kept[kept.serial] = kept
        return kept

    def kept_nbytes(self) -> int:
        idle = {k.storage for k in self.kept.values()} - self.busy
        return len(idle) * STORAGE + sum(k.nbytes for k in self.kept.values())

    def evict(self, index: PrefixIndex) -> list[Kept]:
        out = []
        for kept in index.evict(self.kept_nbytes):
            del self.kept[kept.serial]
            out.append(kept)
        return out


def add(
    index: PrefixIndex,
    decoder: Decoder,
    tokens: list[int],
    how: Schedule | None = None,
    storage: int | None = None,
) -> KeptPrompt:
    prompt = array("I", tokens)
    kept = decoder.keep(prompt, len(decoder.kept) if storage is None else storage)
    made = KeptPrompt(kept, how or schedule(), prompt, PLAN, b"row", None)
    index.add(made)
    return made


def find(
    index: PrefixIndex,
    tokens: list[int],
    *,
    chunk: int = 0,
    cuts: tuple[int, ...] = (),
    shared: bool = True,
    can_reuse: Callable[[Kept, int], bool] = lambda kept, positions: True,
    needs_logits: bool = False,
    verified: frozenset[str] = frozenset(),
) -> list[Found]:
    return index.find(
        array("I", tokens),
        chunk,
        makers={"torch {}"},
        cuts=cuts,
        shared=shared,
        can_reuse=can_reuse,
        needs_logits=needs_logits,
        verified=verified,
    )


# What is offered.


def test_the_same_prompt_is_found_whole() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, [1, 2, 3])
    for shared in (False, True):
        assert find(index, [1, 2, 3], shared=shared) == [Found(kept, 3)]
    assert find(index, [1, 2, 4], shared=False) == []
    assert find(index, [1, 2], shared=False) == []


@pytest.mark.parametrize(
    "other",
    [
        schedule(chunk=2),
        schedule(cuts=(1,)),
        schedule(maker="replay {}"),
        schedule(maker="torch {}+owner"),
    ],
)
def test_identical_means_computed_alike_too(other: Schedule) -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    add(index, decoder, [1, 2, 3], other)
    assert find(index, [1, 2, 3], shared=False) == []


def test_of_a_prompt_that_goes_on_only_the_whole_is_offered_without_a_prefill_chunk() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, [1, 2, 3])
    assert find(index, [1, 2, 3, 4]) == [Found(kept, 3)]
    assert find(index, [1, 2, 9, 4]) == []  # no computation was cut at 2
    assert find(index, [1, 2]) == []  # nor can a shorter prompt take its logits from it


def test_with_a_prefill_chunk_any_multiple_of_it_is_offered() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, list(range(10)), schedule(chunk=4))
    assert find(index, [*range(9), 99, 98], chunk=4) == [Found(kept, 8)]
    assert find(index, [*range(7), 99], chunk=4) == [Found(kept, 4)]
    assert find(index, [*range(3), 99], chunk=4) == []
    assert find(index, [*range(8)], chunk=4) == [Found(kept, 4)]  # its last logits are needed
    assert find(index, [*range(9), 99], chunk=5) == []


def test_the_chunk_counts_anew_from_each_cut() -> None:
    how = schedule(chunk=4, cuts=(3, 5))
    assert list(how.boundaries(12)) == [3, 5, 9, 12]
    assert list(schedule().boundaries(7)) == [7]
    assert list(schedule(chunk=4).boundaries(8)) == [4, 8]
    assert list(schedule(cuts=(3, 9)).boundaries(9)) == [3, 9]


def test_a_cut_that_the_chunk_makes_by_itself_leaves_the_schedule_as_it_is() -> None:
    assert schedule(chunk=4).cut_at(8) == schedule(chunk=4)
    assert schedule(chunk=4).cut_at(7) == schedule(chunk=4, cuts=(7,))
    assert schedule(chunk=4, cuts=(3,)).cut_at(7) == schedule(chunk=4, cuts=(3,))
    assert schedule(cuts=(3, 9)).cut_at(5) == schedule(cuts=(3, 5))
    assert schedule().cut_at(5) == schedule(cuts=(5,))


def test_what_was_cut_as_often_as_can_be_told_is_offered_whole_only() -> None:
    """A conversation adds a cut with each turn."""
    index, decoder = PrefixIndex(10_000), Decoder()
    tokens = list(range(MAX_CUTS + 2))
    most = tuple(range(1, MAX_CUTS + 1))
    kept = add(index, decoder, tokens, schedule(cuts=most))
    assert find(index, [*tokens, 1]) == []
    assert find(index, tokens) == [Found(kept, len(tokens))]
    shorter = add(index, decoder, tokens, schedule(cuts=most[:-1]))
    assert find(index, [*tokens, 1]) == [Found(shorter, len(tokens))]


def test_positions_that_the_decoder_cannot_go_on_from_are_not_offered() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, list(range(10)), schedule(chunk=2))
    tokens = [*range(7), 99]
    assert find(index, tokens, chunk=2, can_reuse=lambda _, p: p <= 3) == [Found(kept, 2)]
    assert find(index, tokens, chunk=2, can_reuse=lambda *_: False) == []


def test_the_longest_comes_first_and_of_those_the_latest() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    short = add(index, decoder, [1, 2])
    old = add(index, decoder, [1, 2, 3])
    new = add(index, decoder, [1, 2, 3], schedule(maker="torch {}+owner"))
    found = find(index, [1, 2, 3, 4])
    assert [each.prompt for each in found] == [new, old, short]
    assert [each.is_all for each in found] == [True] * 3


def test_how_much_two_prompts_share() -> None:
    rng = random.Random(1)
    for _ in range(500):
        one = array("I", [rng.randint(0, 2) for _ in range(rng.randint(0, 20))])
        other = array("I", [*one[: rng.randint(0, 20)], *[rng.randint(0, 2) for _ in range(5)]])
        slow = 0
        while slow < min(len(one), len(other)) and one[slow] == other[slow]:
            slow += 1
        assert common_positions(one, other) == slow


# What stays.


def test_the_one_used_longest_ago_is_evicted_first() -> None:
    index, decoder = PrefixIndex(2 * STORAGE + 20 + ROWS), Decoder()
    first, second, third = (add(index, decoder, [at], storage=at) for at in range(3))
    assert index.pin(first)
    index.unpin(first)  # the latest now
    assert decoder.evict(index) == [second.kept]
    assert [index.has(each) for each in (first, second, third)] == [True, False, True]


def test_what_is_pinned_stays_and_no_more_is_pinned_than_fits() -> None:
    index, decoder = PrefixIndex(2 * STORAGE + 20 + ROWS), Decoder()
    first, second, third = (add(index, decoder, [at], storage=at) for at in range(3))
    assert index.pin(first)
    assert index.pin(second)
    assert not index.pin(third)
    assert decoder.evict(index) == [third.kept]
    assert decoder.kept_nbytes() <= index.nbytes
    assert not index.pin(third), "it is kept no longer"
    index.unpin(first)
    with pytest.raises(LocalProtocolError, match="is not pinned"):
        index.unpin(first)


def test_rows_of_logits_and_tokens_count() -> None:
    index, decoder = PrefixIndex(STORAGE + 10 + 5000), Decoder()
    first, second = add(index, decoder, [1], storage=0), add(index, decoder, [1, 2], storage=0)
    assert decoder.evict(index) == []
    second.logits = bytes(6000)
    assert decoder.evict(index) == [first.kept, second.kept]


def test_what_a_request_failed_on_is_forgotten_pinned_or_not() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    first, second = add(index, decoder, [1]), add(index, decoder, [2])
    assert index.pin(first)
    assert index.forget({first.kept.serial, 99}) == [first.kept]
    assert [index.has(each) for each in (first, second)] == [False, True]
    index.unpin(first)
    index.check_integrity()


def test_a_token_in_place_of_logits_is_offered_to_those_whom_it_does() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, [1, 2])
    kept.logits, kept.token = b"", 7
    assert find(index, [1, 2]) == [Found(kept, 2)]
    assert find(index, [1, 2], needs_logits=True) == []
    assert find(index, [1, 2, 3], needs_logits=True) == [Found(kept, 2)]  # the rest has logits


def test_what_was_looked_at_less_than_asked_for_is_not_offered() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, [1, 2])
    for tokens in ([1, 2], [1, 2, 3]):
        assert find(index, tokens, verified=frozenset({"digest"})) == []
        kept.verified = frozenset({"digest", "poison"})
        assert find(index, tokens, verified=frozenset({"digest"})) == [Found(kept, 2)]
        kept.verified = frozenset()


def test_an_engine_that_does_not_cut_makes_no_boundary_but_the_end() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    kept = add(index, decoder, list(range(8)), schedule(chunk=2))
    kept.is_cut = False
    assert find(index, [*range(7), 99], chunk=2) == []
    assert find(index, [*range(8), 99], chunk=2) == [Found(kept, 8)]


def test_two_on_one_memory_cost_it_once() -> None:
    index, decoder = PrefixIndex(STORAGE + 20 + ROWS), Decoder()
    first, second = add(index, decoder, [1], storage=0), add(index, decoder, [1, 2], storage=0)
    assert index.pin(first)
    assert index.pin(second)
    assert decoder.evict(index) == []


def test_what_is_pinned_only_is_left_beyond_the_bound() -> None:
    """The decoder counts more than it did when this was pinned: there is nothing to be done."""
    index, decoder = PrefixIndex(STORAGE + 20 + ROWS), Decoder()
    prompt = add(index, decoder, [1])
    assert index.pin(prompt)
    assert list(index.evict(lambda: 10 * STORAGE)) == []
    assert index.has(prompt)


def test_a_memory_out_of_service_takes_all_that_is_kept_there_pinned_or_not() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    first, second = add(index, decoder, [1], storage=0), add(index, decoder, [1, 2], storage=0)
    other = add(index, decoder, [3], storage=1)
    assert index.pin(first)
    assert index.lose({0, 7}) == [second.kept, first.kept]
    assert [index.has(each) for each in (first, second, other)] == [False, False, True]
    index.unpin(first)
    index.check_integrity()


def test_a_serial_is_kept_once() -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    prompt = add(index, decoder, [1])
    with pytest.raises(LocalProtocolError, match="kept already"):
        index.add(prompt)


@pytest.mark.parametrize("wrong", ["count", "serial", "length", "pins"])
def test_books_that_do_not_add_up_are_told(wrong: str) -> None:
    index, decoder = PrefixIndex(10_000), Decoder()
    prompt = add(index, decoder, [1])
    if wrong == "count":
        index._counts["added"] += 1
    elif wrong == "serial":
        index._prompts[99] = index._prompts.pop(prompt.kept.serial)
    elif wrong == "length":
        prompt.tokens.append(2)
    else:
        prompt.pins = -1
    with pytest.raises(LocalProtocolError):
        index.check_integrity()


def test_ten_thousand_random_operations_leave_the_index_whole() -> None:
    """Prompts that grow from one another, pinned, evicted, lost: against a list kept by hand."""
    rng = random.Random(5)
    index, decoder = PrefixIndex(6 * STORAGE + 2000), Decoder()
    known: list[KeptPrompt] = []  # the least used first
    pinned: list[KeptPrompt] = []
    made = {"pin": 0, "refused": 0, "evict": 0, "lose": 0, "hit": 0, "miss": 0}
    for step in range(10_000):
        what = rng.choice(["add", "add", "pin", "unpin", "lane", "evict", "lose", "find"])
        if what == "add":
            base = list(rng.choice(known).tokens) if known and rng.random() < 0.5 else []
            tokens = [*base, *[rng.randint(0, 3) for _ in range(rng.randint(1, 4))]][:40]
            chunk = rng.choice([0, 0, 2])
            if not index.holds(array("I", tokens), schedule(chunk)):
                storage = rng.randrange(12)
                decoder.busy.add(storage)  # a lane has just published there
                known.append(add(index, decoder, tokens, schedule(chunk), storage))
        elif what == "pin" and known:
            prompt = rng.choice(known)
            done = index.pin(prompt)
            made["pin" if done else "refused"] += 1
            if done:
                pinned.append(prompt)
                known.remove(prompt)
                known.append(prompt)
        elif what == "unpin" and pinned:
            prompt = pinned.pop(rng.randrange(len(pinned)))
            index.unpin(prompt)
        elif what == "lane":
            decoder.busy.discard(rng.randrange(12))
        elif what == "lose" and rng.random() < 0.1:
            storage = rng.randrange(12)
            lost = index.lose({storage})
            made["lose"] += len(lost)
            assert {k.serial for k in lost} == {
                p.kept.serial for p in known if p.kept.storage == storage
            }
            for kept in lost:
                del decoder.kept[kept.serial]
            known = [p for p in known if p.kept.storage != storage]
        elif what == "find" and known:
            tokens = list(rng.choice(known).tokens)[: rng.randint(1, 40)]
            chunk = rng.choice([0, 2])
            found = find(index, tokens, chunk=chunk)
            made["hit" if found else "miss"] += 1
            for prompt, positions in found:
                assert prompt in known
                assert list(prompt.tokens[:positions]) == tokens[:positions]
                assert positions in list(prompt.schedule.boundaries(len(prompt.tokens)))
        gone = [kept.serial for kept in decoder.evict(index)]
        made["evict"] += len(gone)
        unpinned = [p.kept.serial for p in known if not p.pins]
        assert gone == unpinned[: len(gone)], "not the least used first"
        known = [p for p in known if p.kept.serial not in gone]
        assert decoder.kept_nbytes() <= index.nbytes
        assert list(index) == known, step
        assert all(index.has(p) for p in pinned if p.kept.serial in decoder.kept)
        index.check_integrity()
    assert min(made.values()) > 50, made
