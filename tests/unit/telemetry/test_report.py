"""Every figure of a run, and what it is when the readings cannot tell it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.messages import Interval
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import TIMER_NOISE_NS, Report, evidence, overlap_ns, report_of
from tests.unit.telemetry.scenes import US, at, cancelled, measured, moved, on, streamed, whole


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


def test_t_is_the_tail_of_a_whole_route_run_of_the_same_prompt() -> None:
    told = report(streamed(), streamed(), whole(prompt="another"), whole(), whole())
    assert (told.alone_ns, told.alone) == (2_000 * US, "whole-route run")
    assert told.hidden_share == 1 - 800 / 2_000
    own = report(whole(), whole())
    assert (own.hidden_share, own.bound) == (0.0, 0.0)


@pytest.mark.parametrize(
    "other",
    [
        whole(prompt="another"),
        whole(route="chunked"),
        whole(measured=measured(kv_nbytes=6_000)),
        whole(owner=whole().owner[:-1]),
        whole(owner=(*whole().owner, at("neighbour", 3_000, 3_001))),
    ],
    ids=["prompt", "route", "bytes", "not published", "disturbed"],
)
def test_another_run_does_not_tell_t(other: Run) -> None:
    assert report(streamed(), other).alone == "own imports"


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


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        (("compute", "import"), "device"),
        (("compute", "write", "import"), "device"),
        (("compute",), "host"),
        (("import",), "host"),
        (("write", "announced", "validated"), "host"),
        ((), "host"),
    ],
)
def test_only_two_device_clocks_are_evidence_of_a_device(
    kinds: tuple[str, ...], wanted: str
) -> None:
    assert evidence(align(on("device", streamed(), *kinds))) == wanted


@pytest.mark.parametrize("lane", ["source", "owner"])
def test_one_host_reading_makes_all_of_it_host(lane: str) -> None:
    run = on("device", streamed(), "compute", "import")
    kinds = {"source": "compute", "owner": "import"}
    changed: list[Interval] = list(getattr(run, lane))
    index = next(n for n, each in enumerate(changed) if each.kind == kinds[lane])
    changed[index] = replace(changed[index], clock="host")
    assert evidence(align(replace(run, **{lane: tuple(changed)}))) == "host"


def test_an_empty_side_is_no_evidence() -> None:
    run = on("device", streamed(), "compute", "import")
    assert evidence(align(replace(run, source=()))) == "host"
    assert evidence(align(replace(run, owner=()))) == "host"


def test_writes_on_the_host_clock_do_not_enter_a_kernel_overlap() -> None:
    run = streamed(
        source=(at("compute", 0, 100), at("write", 100, 200, nbytes=3_000)),
        owner=(at("import", 50, 150), at("import", 120, 160)),
    )
    assert overlap_ns(align(run)) == 110 * US
    assert overlap_ns(align(on("device", run, "compute", "import"))) == 50 * US
    assert overlap_ns(align(on("device", run, "compute", "write", "import"))) == 110 * US
