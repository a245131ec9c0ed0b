"""How much of a prompt is taken from what the decoder keeps, and who computes the rest.

The whole of it, if the same prompt was published before: then nothing is left to compute. Else the
first positions, if a kept prompt begins alike; then a source either computes them again and emits
the others only (which saves their transfer), or goes on from its own cache of them, or the owner
computes a short remainder itself. Which one is expected to publish first is told by what is known
of their speed; what is not known is not assumed to be fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.geometry import PrefixUse
from headrace.messages import MAX_CHOICE_TEXT, Remainder, Reuse, travelling_text
from headrace.runtime.prefix import Found

NOTHING: Final = "no kept prompt begins alike"
MOST_TRIED: Final = 2.0  # of the best other way: what measuring the owner's engine may cost
MOST_OWNER_NS: Final = 2e9  # that the owner computes for one remainder: nobody decodes meanwhile,
MOST_OWNER_BESIDE_NS: Final = 1e8  # the same where somebody does
MOST_RECOMPUTED_CUTS: Final = 8  # each is a forward of its own when the source runs from 0


class Way(NamedTuple):
    """One way to get the rest of a prompt, and when it is expected to be published, in ns.

    found: None for a prefill of all of it. ns: None where it is not known.
    """

    found: Found | None
    remainder: Remainder
    ns: float | None
    text: str


class Speeds(NamedTuple):
    """What is known of one owner and its sources, in ns; None where nothing is.

    source_ns: to compute the whole prompt at the source. position_ns: to compute one position of a
    remainder by the owner's own engine; until one was measured it is that of a decode step, which
    it is at most. carry_ns_per_byte: to write and import cells. copy_ns_per_byte: to copy cells
    within the decoder. recompute_off, own_cache_off: by how much a source took longer than a
    prefill of as many positions, when it computed a remainder so. most_owner_ns: how long the owner
    may compute.
    """

    source_ns: float | None
    position_ns: float | None
    carry_ns_per_byte: float | None
    copy_ns_per_byte: float | None
    recompute_off: float = 1.0
    own_cache_off: float = 1.0
    most_owner_ns: float = MOST_OWNER_NS


class Sides(NamedTuple):
    """Who may compute a remainder: what all sources can do, and whether the owner can."""

    source: PrefixUse
    owner: bool


def ways(
    found: Sequence[Found],
    sides: Sides,
    speeds: Speeds,
    num_tokens: int,
    row_nbytes: float,
) -> list[Way]:
    """What can be done for a prompt of `num_tokens`, a prefill of all of it last.

    found: the longest of each kind is looked at. row_nbytes: bytes of one position's cells, on
    average.
    """
    out: list[Way] = []
    if found and found[0].positions == num_tokens:
        return [Way(found[0], "none", 0.0, f"all {num_tokens} positions are kept")]
    cold_ns = _sum(speeds.source_ns, _times(speeds.carry_ns_per_byte, row_nbytes * num_tokens))
    if found:
        best, rest = found[0], num_tokens - found[0].positions
        carried, copied = _moved(best, rest, row_nbytes, speeds)
        share = rest / num_tokens
        if sides.owner:
            ns = _times(speeds.position_ns, float(rest))
            if ns is None or ns <= speeds.most_owner_ns:
                text = f"the owner computes {rest} positions"
                out.append(Way(best, "owner", _sum(ns, copied), text))
        if sides.source == "own_cache":
            computed = _times(speeds.source_ns, share * speeds.own_cache_off)
            text = f"the source goes on for {rest} from its cache, where that has the others"
            out.append(Way(best, "source", _sum(computed, carried, copied), text))
    if sides.source == "recompute":
        out += _recomputed(found, speeds, num_tokens, row_nbytes)
    out.append(Way(None, "source", cold_ns, f"a prefill of all {num_tokens}"))
    return out


def _recomputed(
    found: Sequence[Found], speeds: Speeds, num_tokens: int, row_nbytes: float
) -> list[Way]:
    """By the source from position 0, which takes a forward for each cut: so not of too many."""
    few = (each for each in found if len(each.prompt.schedule.cuts) < MOST_RECOMPUTED_CUTS)
    best = next(few, None)
    if best is None:
        return []
    rest = num_tokens - best.positions
    carried, copied = _moved(best, rest, row_nbytes, speeds)
    computed = _times(speeds.source_ns, speeds.recompute_off)
    text = f"the source computes all {num_tokens} again and sends {rest}"
    return [Way(best, "source", _sum(computed, carried, copied), text)]


def _moved(
    found: Found, rest: int, row_nbytes: float, speeds: Speeds
) -> tuple[float | None, float | None]:
    """To carry the rest from a source, and to copy what is kept where it cannot be taken over."""
    copied = 0.0 if found.is_all else row_nbytes * found.positions
    carried = _times(speeds.carry_ns_per_byte, row_nbytes * rest)
    return carried, _times(speeds.copy_ns_per_byte, copied)


def choose(of: Sequence[Way], *, owner_is_measured: bool = True) -> tuple[Way, str]:
    """The way that is expected to publish first, and why.

    An owner whose engine was not measured yet is tried where even so many decode steps would take
    no more than MOST_TRIED times the best other way. Where the time of a prefill of all is not
    known, a source that has less to send is still taken, since it does no more than that; an
    owner's remainder is not, since it may take for ever.
    """
    *others, cold = of
    if not others:
        return cold, cold.text if cold.found else NOTHING
    if cold.ns is None:
        sent = [way for way in others if way.remainder == "source"]
        if sent:
            return sent[0], f"{sent[0].text}; nothing is known of its speed yet"
        return cold, f"nothing is known yet of how long {others[0].text.removeprefix('the ')} takes"
    known = [way for way in of if way.ns is not None]
    if not owner_is_measured:
        least_ns = min(way.ns or 0.0 for way in known if way.remainder != "owner")
        for way in known:
            if way.remainder == "owner" and (way.ns or 0.0) <= MOST_TRIED * least_ns:
                return way, f"{way.text}, to be measured: at most {_ms(way.ns)}"
    best = min(known, key=lambda way: way.ns or 0.0)
    least = min((w for w in known if w is not best), key=lambda way: way.ns or 0.0, default=None)
    text = f"{best.text}: {_ms(best.ns)}"
    if least is not None:
        text += f", and {least.text} is expected to take {_ms(least.ns)}"
    return best, text


def as_told(way: Way, reason: str) -> Reuse:
    """What a caller is told of the way that was taken."""
    positions = 0 if way.found is None else way.found.positions
    return Reuse(positions, way.remainder, travelling_text(reason)[:MAX_CHOICE_TEXT])


def _times(ns: float | None, count: float) -> float | None:
    return None if ns is None else ns * count


def _sum(*times: float | None) -> float | None:
    return None if None in times else sum(each or 0.0 for each in times)


def _ms(ns: float | None) -> str:
    return "unknown" if ns is None else f"{ns / 1e6:.1f} ms"
