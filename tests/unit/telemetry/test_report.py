"""Every figure of a run, and what it is when the readings cannot tell it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import TIMER_NOISE_NS, Report, report_of
from tests.unit.telemetry.scenes import (
    US,
    at,
    cancelled,
    local,
    measured,
    moved,
    on,
    on_devices,
    parked,
    several,
    streamed,
    whole,
)


def report(run: Run, *among: Run) -> Report:
    return report_of(align(run), [align(other) for other in among])


def test_figures_of_a_streamed_run() -> None:
    told = report(streamed())
    assert told.prefill_ns == 3_100 * US
    assert told.overlap_ns == 400 * US
    assert (told.kv_nbytes, told.imported_nbytes, told.early_nbytes) == (3_000, 3_000, 2_000)
    assert told.tail_ns == 800 * US == sum(told.parts_ns.values())
    assert told.tail_from_last_group_ns == 790 * US
    assert (told.alone_ns, told.alone) == (600 * US, "own imports")
    assert told.hidden_share == 1 - 800 / 600
    assert told.bound == 1 - 1_000 / 3_000
    assert told.drain_ns == 100 * US
    assert told.cancel_ns is None
    assert told.published


def test_t_is_the_importing_of_a_whole_route_run_of_the_same_prompt() -> None:
    """Its tail is longer: what its source writes in it is no part of an import."""
    told = report(streamed(), streamed(), whole(prompt="another"), whole(), whole())
    assert (told.alone_ns, told.alone) == (1_200 * US, "whole-route run")
    assert told.hidden_share == 1 - 800 / 1_200
    own = report(whole(), whole())
    assert (own.hidden_share, own.bound) == (1 - 2_000 / 1_200, 0.0)


def test_writing_that_only_moved_is_not_hidden() -> None:
    """On a whole route it lies in the tail, streamed in the prefill; the imports are the same."""
    run = streamed()
    moved_only = replace(run, owner=(*whole().owner[:-1], at("published", 4_400)))
    told = report(moved_only, whole())
    assert told.tail_ns == 1_200 * US == told.alone_ns
    assert told.whole_tail_ns == 2_000 * US
    assert told.hidden_share == 0


def test_imports_in_flight_together_count_once() -> None:
    busy = (at("import", 3_300, 3_700), at("import", 3_400, 3_800), at("published", 4_000))
    told = report(streamed(owner=busy))
    assert (told.alone_ns, told.alone) == (500 * US, "own imports")
    told = report(streamed(), whole(owner=(*whole().owner[:-1], *busy[:2], at("published", 5_000))))
    assert (told.alone_ns, told.alone) == (1_500 * US, "whole-route run")


def test_what_the_first_token_gained_on_the_whole_route() -> None:
    soon = measured(submitted_ns=7, first_token_ns=4_107)
    late = measured(submitted_ns=9, first_token_ns=5_609)
    told = report(streamed(measured=soon), whole(measured=late))
    assert (told.saved_ns, told.whole_tail_ns) == (1_500, 2_000 * US)
    for run, other in (
        (whole(measured=late), whole(measured=late)),
        (streamed(measured=None), whole(measured=late)),
        (streamed(measured=soon), whole(measured=measured())),
        (streamed(), whole(measured=late)),
    ):
        assert report(run, other).saved_ns is None


def test_one_thread_overlaps_nothing_and_hides_nothing() -> None:
    told = report(local(), whole())
    assert told.local
    assert (told.overlap_ns, told.alone_ns, told.alone, told.hidden_share) == (None,) * 4
    assert told.tail_ns == 800 * US
    assert report(streamed(), local(route="whole")).alone == "own imports"
    assert not report(streamed()).local


def test_writing_with_several_layers_to_a_message_is_computing_too() -> None:
    told = report(several())
    assert (told.compute_ns, told.both_ns, told.write_ns) == (200 * US, 2_600 * US, 0)
    apart = report(streamed())
    assert (apart.compute_ns, apart.both_ns, apart.write_ns) == (2_600 * US, 0, 510 * US)
    after = report(whole())  # it writes three layers when the prefill has ended
    assert (after.compute_ns, after.both_ns, after.write_ns) == (2_900 * US, 0, 500 * US)
    unknown = report(several(source=several().source[:-1]))
    assert unknown.both_ns == 2_600 * US


def test_several_layers_to_a_message_change_no_overlap() -> None:
    """Whatever a bar is called, the source was at work in it."""
    run = several()
    owner = (*run.owner, at("import", 200, 400))
    assert report(replace(run, owner=owner)).overlap_ns == 200 * US


@pytest.mark.parametrize(
    "other",
    [
        whole(prompt="another"),
        whole(route="chunked"),
        whole(measured=measured(kv_nbytes=6_000)),
        whole(owner=whole().owner[:-1]),
        whole(owner=(*whole().owner, at("neighbour", 3_000, 3_001))),
        whole(owner=(*whole().owner, at("parked", 0, 4_000))),
        whole(owner=(*whole().owner, at("parked", 0, 1))),
    ],
    ids=["prompt", "route", "bytes", "not published", "disturbed", "parked", "parked early"],
)
def test_another_run_does_not_tell_t(other: Run) -> None:
    told = report(streamed(), other)
    assert (told.alone, told.whole_tail_ns) == ("own imports", None)


def test_a_share_of_noise_is_no_share() -> None:
    imports = [at("import", 10, 10 + TIMER_NOISE_NS / US)]
    owner = (*imports, at("published", 4_000))
    told = report(streamed(owner=owner))
    assert told.alone_ns == TIMER_NOISE_NS
    assert told.hidden_share is not None
    told = report(streamed(owner=(at("import", 10, 109), at("published", 4_000))))
    assert told.alone_ns is not None
    assert told.alone_ns < TIMER_NOISE_NS
    assert told.hidden_share is None


def test_nothing_to_import() -> None:
    told = report(streamed(owner=(at("published", 4_000),), measured=measured(kv_nbytes=0)))
    assert (told.alone_ns, told.alone, told.hidden_share, told.bound) == (None,) * 4
    assert told.overlap_ns == 0
    assert told.tail_ns == 800 * US


def test_figures_of_a_cancelled_run() -> None:
    told = report(cancelled(), whole(prompt="another"))
    assert (told.outcome, told.reason) == ("cancelled", "cancelled by the caller")
    assert not told.published
    assert (told.prefill_ns, told.tail_ns, told.tail_from_last_group_ns) == (None,) * 3
    assert (told.early_nbytes, told.imported_nbytes, told.kv_nbytes) == (None, 1_000, 1_000)
    assert (told.alone_ns, told.hidden_share, told.bound, told.parts_ns) == (None, None, None, {})
    assert (told.cancel_ns, told.drain_ns) == (1_500 * US, 890 * US)


@pytest.mark.parametrize("by_ns", [4_000_000_000, -4_000_000_000])
def test_another_clock_changes_no_figure_by_more_than_its_error(by_ns: int) -> None:
    run = streamed()
    told, true = report(replace(run, source=moved(run.source, by_ns))), report(run)
    error_ns = told.clock.error_ns
    assert told.tail_ns is not None
    assert true.tail_ns is not None
    assert abs(told.tail_ns - true.tail_ns) <= error_ns
    assert told.overlap_ns == true.overlap_ns
    assert told.early_nbytes == true.early_nbytes
    assert sum(told.parts_ns.values()) == told.tail_ns


def test_clocks_that_contradict_each_other_are_not_compared() -> None:
    run = whole()
    owner = tuple(
        replace(each, begun_ns=each.begun_ns + 200 * US) if each.kind == "granted" else each
        for each in moved(run.owner, -700 * US)
    )
    told = report(replace(run, owner=owner))
    assert told.clock.verdict == "contradictory"
    assert (told.overlap_ns, told.early_nbytes, told.tail_ns, told.hidden_share) == (None,) * 4
    assert told.tail_from_last_group_ns is None
    assert told.prefill_ns == 2_900 * US  # of one clock


def test_what_may_be_claimed_is_told_of_two_processes_on_one_clock_only() -> None:
    both = report(on_devices())
    assert (
        (both.evidence, both.kernel_overlap_ns)
        == ("device", 400 * US)
        == (
            both.overlap.evidence,
            both.overlap.kernels_ns,
        )
    )
    alone = report(on("device", local(), "compute", "import"))
    assert alone.overlap.kernels_ns == 400 * US
    assert (alone.overlap_ns, alone.kernel_overlap_ns) == (None, None)
    owner = (at("granted", 9_000), *on_devices().owner[1:])
    torn = report(on_devices(owner=owner))
    assert torn.clock.verdict == "contradictory"
    assert (torn.overlap_ns, torn.kernel_overlap_ns) == (None, None)


def test_a_device_tells_computing_from_writing() -> None:
    told = report(on("device", several(), "write"))
    assert (told.both_ns, told.write_ns) == (0, 2_600 * US)


def test_waiting_for_a_lane_is_no_part_of_the_tail() -> None:
    told = report(parked(), whole())
    assert told.parked_ns == 6_000 * US
    assert told.tail_ns == 800 * US == sum(told.parts_ns.values())
    assert (told.parts_ns["importing"], told.parts_ns["neighbours"]) == (600 * US, 0)
    assert told.tail_from_last_group_ns == 800 * US
    assert told.hidden_share == 1 - 800 / 1_200
    assert report(streamed()).parked_ns is None


def test_a_tail_begins_with_the_prefill_s_end_where_parking_ended_before() -> None:
    run = parked()
    early = [replace(e, ended_ns=e.begun_ns + 1) if e.kind == "parked" else e for e in run.owner]
    told = report(replace(run, owner=tuple(early)))
    assert (told.parked_ns, told.tail_ns) == (1, 3_600 * US)
    assert told.tail_from_last_group_ns == 3_590 * US


def test_nothing_is_saved_or_lost_by_waiting_for_a_lane() -> None:
    """TTFT counts from the submission, and so does whatever held the lane."""
    times = {"submitted_ns": 0, "first_token_ns": 5_000}
    one, other = streamed(measured=measured(**times)), whole(measured=measured(**times))
    assert report(one, other).saved_ns == 0
    assert report(replace(parked(), measured=one.measured), other).saved_ns is None
    waited = replace(other, owner=(*other.owner, at("parked", 0, 10)))
    assert report(one, waited).saved_ns is None


def test_what_was_never_given_a_lane_has_parked_time_and_no_tail() -> None:
    run = cancelled()
    told = report(replace(run, owner=(*run.owner, at("parked", 0, 1_510))))
    assert (told.parked_ns, told.tail_ns) == (1_510 * US, None)
