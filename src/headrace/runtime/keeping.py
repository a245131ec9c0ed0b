"""The kept prompts of one owner: looked up when a request is submitted, added when it is published.

What is looked up stays until the request is published or over. What is published is kept before its
first decode step. What is kept stays within the decoder's bound: whenever a lane is given back, the
prompts that were used longest ago are evicted, before anything else is reserved.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from headrace.backends.base import (
    Decoder,
    Entry,
    KeepsEntries,
    Kept,
    Reservation,
    ReservesByLabel,
)
from headrace.errors import WouldBlock
from headrace.geometry import Manifest, PrefixUse
from headrace.messages import Measured, Reuse
from headrace.runtime.costs import Costs, Figure
from headrace.runtime.prefix import Found, KeptPrompt, PrefixIndex, Schedule
from headrace.runtime.requests import RequestOptions
from headrace.runtime.reuse import (
    MOST_OWNER_BESIDE_NS,
    MOST_OWNER_NS,
    Sides,
    Speeds,
    as_told,
    choose,
    ways,
)

_log = logging.getLogger("headrace.owner")

_USES: Final[tuple[PrefixUse, ...]] = ("none", "recompute", "own_cache")


class Maker(NamedTuple):
    """A source that may be asked for a remainder: who it is, and what it can do."""

    name: str
    prefix: PrefixUse


def verified_by(options: RequestOptions) -> frozenset[str]:
    """How the cells of such a request are looked at before they are published."""
    asked = (("digest", options.digest), ("poison", options.poison))
    return frozenset(name for name, is_asked in asked if is_asked)


class Keeping:
    """What one decoder keeps; it keeps nothing if it cannot, or was not told to."""

    def __init__(self, decoder: Decoder, manifest: Manifest) -> None:
        self._decoder = decoder
        self._keeper = decoder if isinstance(decoder, KeepsEntries) else None
        self._manifest = manifest
        self.index = PrefixIndex(0 if self._keeper is None else self._keeper.keeps_nbytes)
        self._step_ns: Figure | None = None  # one decode step
        self._position_ns: Figure | None = None  # one position of a remainder, by the owner
        self._off = {use: Figure(1.0) for use in _USES}  # of a remainder by a source

    def look_up(
        self,
        tokens: array[int],
        options: RequestOptions,
        makers: Iterable[Maker],
        *,
        owner_continues: bool,
        costs: Costs | None,
        decoding: bool,
    ) -> tuple[Found | None, Reuse | None]:
        """What a request can go on from, pinned, and what its caller is told of it.

        makers: every source that it may go to. owner_continues: whether the owner's own engine can
        compute a remainder. costs: of the source, as far as they are known. decoding: whether
        entries decode, which stand still while the owner computes.
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
            cuts=self.schedule_of(options, "").cuts,
            shared=options.prefix == "shared" and not options.prefill_cuts,
            can_reuse=self._keeper.can_reuse,
            needs_logits=options.sampling.temperature > 0 or options.audit,
            verified=verified_by(options),
        )
        uses = [_USES.index(maker.prefix) for maker in makers]
        sides = Sides(_USES[min(uses, default=0)], owner_continues)
        row_nbytes = float(sum(layer.row_nbytes for layer in self._manifest.layers))
        speeds = self._speeds(len(tokens), options.prefill_chunk, costs, decoding=decoding)
        offers = ways(found, sides, speeds, len(tokens), row_nbytes)
        way, reason = choose(offers, owner_is_measured=self._position_ns is not None)
        if way.found is not None and not self.index.pin(way.found.prompt):
            return None, Reuse(0, "source", "more prompts are about to be used than may be kept")
        return way.found, as_told(way, reason)

    def reserve(
        self, found: Found | None, num_tokens: int, label: int | None = None
    ) -> Reservation:
        """Storage for an attempt, with what its request goes on from in place.

        label: of the request, where the decoder's storage is bound to it.

        Raises: as the decoder's `reserve`; WouldBlock where what was kept was lost meanwhile.
        """
        if isinstance(self._decoder, ReservesByLabel):
            return self._decoder.reserve_for(label, num_tokens)
        if found is None or self._keeper is None:
            return self._decoder.reserve(num_tokens)
        if not self.index.has(found.prompt):
            raise WouldBlock("what was kept of its prompt went out of service")
        return self._keeper.reserve_from(found.prompt.kept, found.positions, num_tokens)

    def publish(self, entry: Entry, make: Callable[[Kept], KeptPrompt]) -> Kept | None:
        """Keep what was just published, unless the same is.

        `make` says what it is; it is asked once for a stand-in, and once when it is kept.

        Raises: what the decoder raises; then nothing is kept.
        """
        nothing = make(Kept(0, entry.num_tokens, 0, 0, 0))
        if self._keeper is None or self.index.holds(nothing.tokens, nothing.schedule):
            return None
        kept = self._keeper.keep(entry)
        try:
            self.index.add(make(kept))
        except BaseException:  # an interrupt: nobody else would evict it
            self._drop(kept)
            raise
        self.evict()
        return kept

    def schedule_of(
        self, options: RequestOptions, maker: str, found: Found | None = None
    ) -> Schedule:
        """How the cells of a prompt come to be that goes on from what was found, if anything."""
        if found is not None:
            before = found.prompt.schedule
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

    def lose(self, held: Reservation | Entry) -> None:
        """The memory that a lane uses is out of service, and with it all that is kept there."""
        if self._keeper is None:
            return
        try:
            storage = self._keeper.storage_of(held)
        except Exception as exc:
            _log.error("where %s lies is not known, so nothing is kept any more: %s", held, exc)
            lost = self.index.lose({prompt.kept.storage for prompt in self.index})
        else:
            lost = self.index.lose({storage})
        for each in lost:
            self._drop(each)

    def distrust(self, *prompts: Kept | None) -> None:
        """What a request failed on is kept no longer: the next one would fail on it again."""
        for lost in self.index.forget({each.serial for each in prompts if each is not None}):
            self._drop(lost)

    def stepped(self, ns: int) -> None:
        """A decode step took this long."""
        if self._step_ns is None:
            self._step_ns = Figure(float(ns))
        self._step_ns.add(float(ns))

    def computed_there(
        self, use: PrefixUse, share: float, prefill_ns: float | None, measured: Measured
    ) -> None:
        """A source computed a remainder of this share of a prompt, of which a prefill is expected
        to take so long.
        """
        if use == "recompute":
            share = 1.0
        if prefill_ns:
            took_ns = measured.source_final_ns - measured.prefill_begun_ns
            self._off[use].add(took_ns / (share * prefill_ns))

    def computed_here(self, positions: int, measured: Measured) -> None:
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

    def _speeds(
        self, num_tokens: int, prefill_chunk: int, costs: Costs | None, *, decoding: bool
    ) -> Speeds:
        figure = self._position_ns or self._step_ns  # a step computes one position, and no faster
        position_ns = None if figure is None else figure.value
        most_ns = MOST_OWNER_BESIDE_NS if decoding else MOST_OWNER_NS
        off = self._off["recompute"].value, self._off["own_cache"].value, most_ns
        if costs is None:
            return Speeds(None, position_ns, None, None, *off)
        import_ns = costs.import_ns_per_byte.value
        carry_ns = costs.write_ns_per_byte.value + import_ns
        compute_ns = costs.compute_ns(num_tokens, prefill_chunk)
        return Speeds(compute_ns, position_ns, carry_ns, import_ns, *off)
