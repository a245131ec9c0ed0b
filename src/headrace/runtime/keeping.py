"""The kept prompts of one owner: looked up when a request is submitted, added when it is published.

What is looked up stays until the request is published or over. What is published is kept before its
first decode step. What is kept stays within the decoder's bound: whenever a lane is given back, the
prompts that were used longest ago are evicted, before anything else is reserved.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from headrace.backends.base import Decoder, Entry, KeepsEntries, Kept, Reservation
from headrace.errors import WouldBlock
from headrace.geometry import Manifest, PrefixUse
from headrace.messages import Measured, Remainder, Reuse
from headrace.plan import Plan
from headrace.runtime.costs import Costs, Figure
from headrace.runtime.prefix import OWNER, Found, KeptPrompt, PrefixIndex, Schedule
from headrace.runtime.requests import RequestOptions
from headrace.runtime.reuse import Sides, Speeds, as_told, choose, ways

_log = logging.getLogger("headrace.owner")

_USES: Final[tuple[PrefixUse, ...]] = ("none", "recompute", "own_cache")


class Maker(NamedTuple):
    """A source that may be asked for a remainder: who it is, and what it can do."""

    name: str
    prefix: PrefixUse


class Keeping:
    """What one decoder keeps; it keeps nothing if it cannot, or was not told to."""

    def __init__(self, decoder: Decoder, manifest: Manifest) -> None:
        self._decoder = decoder
        self._keeper = decoder if isinstance(decoder, KeepsEntries) else None
        self._manifest = manifest
        self.index = PrefixIndex(0 if self._keeper is None else self._keeper.keeps_nbytes)
        self._step_ns: Figure | None = None  # one decode step
        self._position_ns: Figure | None = None  # one position of a remainder, by the owner

    def look_up(
        self,
        tokens: array[int],
        options: RequestOptions,
        makers: Iterable[Maker],
        *,
        owner_continues: bool,
        costs: Costs | None,
    ) -> tuple[Found | None, Reuse | None]:
        """What a request can go on from, pinned, and what its caller is told of it.

        makers: every source that it may go to. owner_continues: whether the owner's own engine can
        compute a remainder. costs: of the source, as far as they are known.
        """
        if options.prefix == "off":
            return None, None
        if self._keeper is None or not self.index.nbytes:
            return None, Reuse(0, "source", "this decoder keeps no prompts")
        makers = list(makers)
        found = self.index.find(
            tokens,
            options.prefill_chunk,
            makers={maker.name for maker in makers},
            cuts=options.prefill_cuts,
            shared=options.prefix == "shared",
            can_reuse=self._keeper.can_reuse,
        )
        uses = [_USES.index(maker.prefix) for maker in makers]
        sides = Sides(_USES[min(uses, default=0)], owner_continues)
        row_nbytes = float(sum(layer.row_nbytes for layer in self._manifest.layers))
        speeds = self._speeds(len(tokens), options.prefill_chunk, costs)
        offers = ways(found, sides, speeds, len(tokens), row_nbytes)
        way, reason = choose(offers, owner_is_measured=self._position_ns is not None)
        if way.found is not None and not self.index.pin(way.found.prompt):
            return None, Reuse(0, "source", "more prompts are about to be used than may be kept")
        return way.found, as_told(way, reason)

    def reserve(self, found: Found | None, num_tokens: int) -> Reservation:
        """Storage for an attempt, with what its request goes on from in place.

        Raises: as the decoder's `reserve`; WouldBlock where what was kept was lost meanwhile.
        """
        if found is None or self._keeper is None:
            return self._decoder.reserve(num_tokens)
        if not self.index.has(found.prompt):
            raise WouldBlock("what was kept of its prompt went out of service")
        return self._keeper.reserve_from(found.prompt.kept, found.positions, num_tokens)

    def publish(
        self,
        entry: Entry,
        tokens: Sequence[int],
        schedule: Schedule,
        plan: Plan,
        logits: bytes,
        token: int | None,
    ) -> Kept | None:
        """Keep what was just published, unless the same is. Raises: what the decoder raises."""
        prompt = array("I", tokens)
        if self._keeper is None or self.index.holds(prompt, schedule):
            return None
        kept = self._keeper.keep(entry)
        self.index.add(KeptPrompt(kept, schedule, prompt, plan, logits, token))
        self.evict()
        return kept

    def schedule_of(
        self, options: RequestOptions, maker: str, found: Found | None, remainder: Remainder
    ) -> Schedule:
        """How the cells of a prompt came to be that was published just now."""
        if found is not None:
            before = found.prompt.schedule
            maker = OWNER if remainder == "owner" else maker
            name = before.maker if before.maker == maker else f"{before.maker}+{maker}"
            return before._replace(maker=name).cut_at(found.positions)
        dtypes = {part.dtype for layer in self._manifest.layers for part in layer.parts}
        name = "+".join(sorted(dtypes))
        schedule = Schedule(self._manifest.model, name, maker, options.prefill_chunk, ())
        for cut in options.prefill_cuts:
            schedule = schedule.cut_at(cut)
        return schedule

    def evict(self) -> None:
        """Evict what is beyond the bound; to be called when a lane was given back.

        A decoder that cannot evict has lost the memory, and keeps counting it: what it raises is
        told to the log, and nothing more is kept than it says there is room for.
        """
        if self._keeper is None:
            return
        keeper = self._keeper
        for kept in self.index.evict(lambda: keeper.kept_nbytes):
            self._drop(kept)

    def lose(self, *kept: Kept | None) -> None:
        """The memories of these are out of service, and with them all that is kept there."""
        storages = {each.storage for each in kept if each is not None}
        for lost in self.index.lose(storages) if storages else ():
            self._drop(lost)

    def stepped(self, ns: int) -> None:
        """A decode step took this long."""
        if self._step_ns is None:
            self._step_ns = Figure(float(ns))
        self._step_ns.add(float(ns))

    def computed(self, positions: int, measured: Measured) -> None:
        """The owner computed a remainder of so many positions."""
        ns = (measured.source_final_ns - measured.prefill_begun_ns) / positions
        if self._position_ns is None:
            self._position_ns = Figure(ns)
        self._position_ns.add(ns)

    def _drop(self, kept: Kept) -> None:
        if self._keeper is None:
            return
        try:
            self._keeper.evict(kept)
        except Exception as exc:
            _log.error("%s was not evicted: %s", kept, exc)

    def _speeds(self, num_tokens: int, prefill_chunk: int, costs: Costs | None) -> Speeds:
        figure = self._position_ns or self._step_ns  # a step computes one position, and no faster
        position_ns = None if figure is None else figure.value
        if costs is None:
            return Speeds(None, position_ns, None, None)
        import_ns = costs.import_ns_per_byte.value
        carry_ns = costs.write_ns_per_byte.value + import_ns
        return Speeds(costs.compute_ns(num_tokens, prefill_chunk), position_ns, carry_ns, import_ns)
