"""Which prompts' cells a decoder keeps, and how much of one the next prompt can go on from.

An entry is found by its tokens and by how its cells were computed: the model's fingerprint, the
dtype, who computed them, and where the computation was cut. Cells of two prompts that begin alike
are the same bits only up to a position at which both computations were cut. So positions [0, p) of
an entry are offered only where p is such a cut, which the end of its prompt always is.

Only what was published is ever added: a hand-off that failed, was cancelled or is under way has no
entry here. What was used longest ago is evicted first, and never while somebody waits to use it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from headrace.backends.base import Kept
from headrace.errors import LocalProtocolError
from headrace.messages import MAX_CUTS
from headrace.plan import Plan

OWNER: Final = "owner"  # as a maker: the owner's own engine


class Schedule(NamedTuple):
    """How the cells of a prompt were computed; the same for two prompts with the same bits.

    maker: which engine. prefill_chunk, cuts: as in a grant; a cut that the chunk makes by itself is
    left out.
    """

    model: str
    dtype: str
    maker: str
    prefill_chunk: int
    cuts: tuple[int, ...]

    def boundaries(self, num_tokens: int) -> Iterator[int]:
        """The positions at which the computation of such a prompt was cut, its end last."""
        edges = [0, *(cut for cut in self.cuts if cut < num_tokens), num_tokens]
        for start, stop in pairwise(edges):
            if self.prefill_chunk:
                yield from range(start + self.prefill_chunk, stop, self.prefill_chunk)
            yield stop

    def cut_at(self, position: int) -> Schedule:
        """That of a prompt which goes on from this position of one of this schedule."""
        cuts = tuple(cut for cut in self.cuts if cut < position)
        since = position - (cuts[-1] if cuts else 0)
        made_by_chunk = self.prefill_chunk and since % self.prefill_chunk == 0
        return self._replace(cuts=cuts if made_by_chunk else (*cuts, position))


@dataclass(slots=True, eq=False)
class KeptPrompt:
    """One published prompt: its tokens, its cells, and what chose its first token.

    plan: of all its positions. logits: the source-final row, empty where a `token` was given
    instead. is_cut: whether its engine cut the computation as it was asked to; else only the end of
    the prompt is a cut. verified: what its cells were looked at with before it was published.
    pins: requests that are about to use it.
    """

    kept: Kept
    schedule: Schedule
    tokens: array[int]
    plan: Plan
    logits: bytes
    token: int | None
    is_cut: bool = True
    verified: frozenset[str] = frozenset()
    pins: int = 0

    @property
    def row_nbytes(self) -> int:
        """Bytes of what is kept of it beside its cells."""
        return len(self.logits) + self.tokens.itemsize * len(self.tokens)


class Found(NamedTuple):
    """A kept prompt whose first `positions` are those of another."""

    prompt: KeptPrompt
    positions: int

    @property
    def is_all(self) -> bool:
        """Whether it is the whole of the kept prompt."""
        return self.positions == self.prompt.kept.num_tokens


@dataclass
class PrefixIndex:
    """The kept prompts of one decoder, those used longest ago first; at most `nbytes` of them.

    nbytes: of lane memories without a lane and of tails, as the decoder counts them, and of rows of
    logits and tokens.
    """

    nbytes: int
    _prompts: dict[int, KeptPrompt] = field(default_factory=dict)  # by the serial of what is kept
    _counts: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[KeptPrompt]:
        return iter(self._prompts.values())

    def find(
        self,
        tokens: array[int],
        prefill_chunk: int,
        *,
        makers: Collection[str],
        cuts: tuple[int, ...],
        shared: bool,
        can_reuse: Callable[[Kept, int], bool],
        needs_logits: bool = False,
        verified: frozenset[str] = frozenset(),
    ) -> list[Found]:
        """What of the kept prompts a prompt can go on from, the longest first, then the latest.

        Only the same prompt, computed by one of `makers` with these cuts, unless `shared`: then
        also what begins alike, however it was computed, up to a cut of it; but for what was cut so
        often that one cut more cannot be told. `cuts`: but for those that the chunk makes by
        itself. `needs_logits`: a token in their place does not do. `verified`: how its cells must
        have been looked at.
        """
        found: list[Found] = []
        for prompt in reversed(self._prompts.values()):
            schedule = prompt.schedule
            if schedule.prefill_chunk != prefill_chunk or verified - prompt.verified:
                continue
            same = prompt.tokens == tokens
            as_asked = schedule.cuts == cuts and schedule.maker in makers
            usable = bool(prompt.logits) or not needs_logits
            if same and usable and (shared or as_asked):
                found.append(Found(prompt, len(tokens)))
            elif shared and not same and len(schedule.cuts) < MAX_CUTS:
                positions = _shared_positions(prompt, tokens, can_reuse)
                if positions:
                    found.append(Found(prompt, positions))
        return sorted(found, key=lambda each: -each.positions)

    def holds(self, tokens: array[int], schedule: Schedule) -> bool:
        """Whether this prompt is kept already, computed in this way."""
        return any(p.schedule == schedule and p.tokens == tokens for p in self)

    def add(self, prompt: KeptPrompt) -> None:
        """A prompt was published and is kept from now on. Raises: LocalProtocolError."""
        if prompt.kept.serial in self._prompts:
            raise LocalProtocolError(f"{prompt.kept} is kept already")
        self._prompts[prompt.kept.serial] = prompt
        self._counts["added"] += 1

    def pin(self, prompt: KeptPrompt) -> bool:
        """Have it stay until `unpin`, and make it the latest; False where that cannot be promised.

        What is pinned fits into `nbytes` even when no lane uses it, so that everything else can be
        evicted in its favour.
        """
        if not self.has(prompt):
            return False
        pinned = [p for p in self if p.pins or p is prompt]
        storages = {p.kept.storage: p.kept.storage_nbytes for p in pinned}
        nbytes = sum(storages.values()) + sum(p.kept.nbytes + p.row_nbytes for p in pinned)
        if nbytes > self.nbytes:
            self._counts["unpinnable"] += 1
            return False
        prompt.pins += 1
        self._prompts[prompt.kept.serial] = self._prompts.pop(prompt.kept.serial)
        return True

    def unpin(self, prompt: KeptPrompt) -> None:
        """One request less is about to use it. Raises: LocalProtocolError."""
        if prompt.pins < 1:
            raise LocalProtocolError(f"{prompt.kept} is not pinned")
        prompt.pins -= 1

    def evict(self, kept_nbytes: Callable[[], int]) -> Iterator[Kept]:
        """What the decoder must evict, one by one, until all is within the bound.

        `kept_nbytes`: what the decoder counts.
        """
        while kept_nbytes() + sum(prompt.row_nbytes for prompt in self) > self.nbytes:
            victim = next((prompt for prompt in self if not prompt.pins), None)
            if victim is None:
                return
            del self._prompts[victim.kept.serial]
            self._counts["evicted"] += 1
            yield victim.kept

    def lose(self, storages: Collection[int]) -> list[Kept]:
        """These memories are out of service: what lay there is kept no longer, pinned or not."""
        lost = [prompt.kept for prompt in self if prompt.kept.storage in storages]
        for kept in lost:
            del self._prompts[kept.serial]
        self._counts["lost"] += len(lost)
        return lost

    def forget(self, serials: Collection[int]) -> list[Kept]:
        """These are not to be used again, pinned or not."""
        lost = [prompt.kept for prompt in self if prompt.kept.serial in serials]
        for kept in lost:
            del self._prompts[kept.serial]
        self._counts["lost"] += len(lost)
        return lost

    def has(self, prompt: KeptPrompt) -> bool:
        """Whether it is kept still."""
        return self._prompts.get(prompt.kept.serial) is prompt

    def statistics(self) -> dict[str, int]:
        """Prompts kept and pinned; and since the start those added, evicted and lost."""
        counts = {name: self._counts[name] for name in ("added", "evicted", "lost", "unpinnable")}
        return {"prompts": len(self), "pinned": sum(bool(p.pins) for p in self), **counts}

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless the counts add up and each prompt is what it says."""
        counts = self._counts
        if len(self) != counts["added"] - counts["evicted"] - counts["lost"]:
            raise LocalProtocolError(f"{len(self)} prompts are kept, and counted were {counts}")
        for serial, prompt in self._prompts.items():
            kept = prompt.kept
            if serial != kept.serial or len(prompt.tokens) != kept.num_tokens or prompt.pins < 0:
                raise LocalProtocolError(f"{kept} is kept as {serial}, pinned {prompt.pins} times")


def common_positions(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two prompts share, by comparing halves: log2(n) comparisons of runs."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shared_positions(
    prompt: KeptPrompt, tokens: array[int], can_reuse: Callable[[Kept, int], bool]
) -> int:
    """Positions of a kept prompt that one with other tokens can go on from; 0 if none.

    At least the last of them is left to compute, since only it yields the first token's logits.
    """
    alike = min(common_positions(prompt.tokens, tokens), len(tokens) - 1)
    num_tokens = len(prompt.tokens)
    cuts = prompt.schedule.boundaries(num_tokens) if prompt.is_cut else [num_tokens]
    boundaries = [at for at in cuts if at <= alike]
    return next((at for at in reversed(boundaries) if can_reuse(prompt.kept, at)), 0)
