"""A run's figures in words, the same for a terminal and for a page, and as a JSON object.

What may be called a kernel overlap is decided in `headrace.telemetry.claim`, and said here.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.telemetry.report import TIMER_NOISE_NS, Report
from headrace.telemetry.tail import LABELS, PARTS

NO_CLAIM: Final = "nothing is claimed about kernels"
HOST_ONLY: Final = f"host intervals: {NO_CLAIM}"
BOTH_DEVICES: Final = "between device events of both sides, gaps between kernels included"
FAKES: Final = f"events of a fake device: {NO_CLAIM}"

ONE_THREAD: Final = "one process, one thread: the owner computed the prompt itself"

_EVENTS: Final = {"device": "device events", "fake": "events of a fake device"}
_CONTRADICT: Final = "the two clocks contradict each other"


def title(report: Report) -> str:
    """What ran and what became of it, in a line."""
    route = report.route if report.route == report.name else f"{report.name} ({report.route})"
    by = ", computed by the owner itself" if report.local else ""
    return f"{route}: {report.num_tokens} prompt tokens, {report.outcome}{by}"


def figures(report: Report) -> list[tuple[str, str]]:
    """What there is to say of a run: (figure, its value with what it rests on)."""
    found = [
        ("reason", report.reason),
        ("route chosen", report.choice),
        ("clocks", clocks(report)),
        ("prefill", _ms(report.prefill_ns)),
        ("source", _source(report)),
        overlap(report),
        ("imported early", _early(report)),
        ("parked", _parked(report)),
        ("transfer tail", _tail(report)),
        ("hidden share", _hidden(report)),
        ("TTFT saved", _saved(report)),
        (
            "cancelled",
            "" if report.cancel_ns is None else f"{_ms(report.cancel_ns)} after the grant",
        ),
        ("drained in", _ms(report.drain_ns)),
    ]
    return [(name, value) for name, value in found if value]


def clocks(report: Report) -> str:
    """Whether the two sides read one clock."""
    clock = report.clock
    within = f"{clock.error_ns / 1e3:.0f} us"
    match clock.verdict:
        case "one":
            return f"one clock (readings agree within {within})"
        case "shifted":
            side = "ahead of" if clock.offset_ns > 0 else "behind"
            return (
                f"two clocks: the source's is {abs(clock.offset_ns) / 1e9:.6f} s {side} the "
                f"owner's (within {within}); its intervals were shifted before anything was "
                "computed"
            )
        case "contradictory":
            return "no offset fits all messages: times of the two sides are not compared"
        case _:
            return "not checked: messages of both directions are needed; taken for one clock"


def overlap(report: Report) -> tuple[str, str]:
    """The overlap, by the name that its clocks allow."""
    if report.kernel_overlap_ns is not None:
        name = "kernel overlap"
    else:
        name = f"{report.evidence} overlap"
    if report.local:
        return name, f"n/a: {ONE_THREAD} and imported in between"
    if report.overlap_ns is None:
        return name, f"n/a: {_CONTRADICT}"
    if report.evidence == "host":
        worked = f"{_ms(report.overlap_ns)} of importing while the source worked"
        return name, f"{worked} ({_host_grounds(report)})"
    computed = f"{_ms(report.overlap_ns)} of importing while the source computed"
    if report.evidence == "fake":
        return name, f"{computed} ({FAKES})"
    within = f"each stretch within {_us(report.overlap.error_ns)}"
    if report.kernel_overlap_ns is not None:
        computed = f"{_ms(report.kernel_overlap_ns)} of importing while the source computed"
        return name, f"{computed} ({BOTH_DEVICES}, {within}; shorter ones are not counted)"
    if not report.overlap_ns:
        return name, f"{computed} ({BOTH_DEVICES})"
    return name, f"{computed} ({BOTH_DEVICES}, but no stretch beyond its error: {NO_CLAIM})"


def _host_grounds(report: Report) -> str:
    """What is claimed where a side was read from the host, and which one."""
    for side, other in (("source", report.overlap.owner), ("owner", report.overlap.source)):
        if other != "host":
            return f"{_EVENTS[other]} of one side, host intervals of the {side}: {NO_CLAIM}"
    return HOST_ONLY


def parts(report: Report) -> list[tuple[str, str, str]]:
    """What the tail was made of: (part, time, share of the tail); all of them, or none."""
    tail_ns = report.tail_ns
    if tail_ns is None:
        return []
    return [
        (LABELS[part], _ms(report.parts_ns[part]), _percent(report.parts_ns[part], tail_ns))
        for part in PARTS
    ]


def as_object(report: Report) -> dict[str, Any]:
    """The report with stable keys: seconds, bytes, shares of 1, null where there is no figure."""
    clock = report.clock
    return {
        "name": report.name,
        "route": report.route,
        "choice": report.choice,
        "prompt_tokens": report.num_tokens,
        "outcome": report.outcome,
        "reason": report.reason,
        "clocks": clock.verdict,
        "clock_offset_s": clock.offset_ns / 1e9,
        "clock_error_s": clock.error_ns / 1e9,
        "local": report.local,
        "evidence": report.evidence,
        "prefill_s": _seconds(report.prefill_ns),
        "compute_s": report.compute_ns / 1e9,
        "write_s": report.write_ns / 1e9,
        "compute_and_write_s": report.both_ns / 1e9,
        "overlap_s": _seconds(report.overlap_ns),
        "overlap_error_s": report.overlap.error_ns / 1e9,
        "kernel_overlap_s": _seconds(report.kernel_overlap_ns),
        "kv_bytes": report.kv_nbytes,
        "bytes_imported": report.imported_nbytes,
        "bytes_imported_before_prefill_end": report.early_nbytes,
        "transfer_tail_s": _seconds(report.tail_ns),
        "tail_from_last_group_s": _seconds(report.tail_from_last_group_ns),
        "tail_parts_s": {part: ns / 1e9 for part, ns in report.parts_ns.items()},
        "alone_s": _seconds(report.alone_ns),
        "alone_from": report.alone,
        "hidden_share": report.hidden_share,
        "hidden_share_bound": report.bound,
        "ttft_saved_s": _seconds(report.saved_ns),
        "whole_route_tail_s": _seconds(report.whole_tail_ns),
        "parked_s": _seconds(report.parked_ns),
        "cancelled_after_s": _seconds(report.cancel_ns),
        "drain_s": _seconds(report.drain_ns),
    }


def _source(report: Report) -> str:
    """What it did, in as much as its messages tell the two apart."""
    told = (
        (report.compute_ns, "computing"),
        (report.both_ns, "computing and writing, several layers to a message"),
        (report.write_ns, "writing"),
    )
    clock = report.overlap.source
    by = "" if clock == "host" else f", by {_EVENTS[clock]}"
    found = ", ".join(f"{_ms(ns)} {what}" for ns, what in told if ns)
    return f"{found}{by}" if found else ""


def _saved(report: Report) -> str:
    if report.saved_ns is None or report.whole_tail_ns is None:
        return ""
    share = _percent(report.saved_ns, report.whole_tail_ns)
    of = f"{share} of its tail of {_ms(report.whole_tail_ns)}" if share else "it has no tail"
    return f"{_ms(report.saved_ns)} against the whole route on the same prompt ({of})"


def _early(report: Report) -> str:
    if report.early_nbytes is None:
        unknown = "the end of the prefill is not known" if report.clock.comparable else _CONTRADICT
        return f"n/a: {unknown}; {_size(report.imported_nbytes)} were imported in all"
    share = _percent(report.early_nbytes, report.kv_nbytes)
    within = f"{_size(report.early_nbytes)} of {_size(report.kv_nbytes)}"
    return f"{within} before the prefill ended{share and f' ({share})'}"


def _parked(report: Report) -> str:
    if report.parked_ns is None:
        return ""
    return f"{_ms(report.parked_ns)} in its slot, waiting for the lane: no part of the tail"


def _tail(report: Report) -> str:
    if report.tail_ns is None:
        return f"n/a: {_why_no_tail(report)}"
    last = report.tail_from_last_group_ns
    since = "" if last is None else f"; {_ms(last)} from the end of the last layer group"
    parked = "" if report.parked_ns is None else ", or of parking if that was later,"
    return f"{_ms(report.tail_ns)} from the end of the prefill{parked} to publishing{since}"


def _why_no_tail(report: Report) -> str:
    if not report.published:
        return "nothing was published"
    if not report.clock.comparable:
        return _CONTRADICT
    return "these readings do not have the end of the prefill before publishing"


def _hidden(report: Report) -> str:
    if report.local:
        return f"n/a: {ONE_THREAD}"
    if report.alone_ns is None or report.tail_ns is None:
        return ""
    bound = (
        ""
        if report.bound is None
        else f"; all but the last layer group is {100 * report.bound:.1f} %"
    )
    alone = f"T = {_ms(report.alone_ns)}, {_ALONE[report.alone or 'own imports']}"
    if report.hidden_share is None:
        return f"n/a: {alone}, is below {_ms(TIMER_NOISE_NS)}: wake-ups of processes decide there"
    return f"{100 * report.hidden_share:.1f} % of {alone}{bound}"


_ALONE: Final = {
    "whole-route run": "the imports of the whole route on the same prompt",
    "own imports": "this run's own imports (no whole-route run to compare with)",
}


def _ms(nanoseconds: int | None) -> str:
    return "" if nanoseconds is None else f"{nanoseconds / 1e6:.3f} ms"


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e3:.1f} us"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1_000_000 else f"{nbytes / 1e3:.1f} kB"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
