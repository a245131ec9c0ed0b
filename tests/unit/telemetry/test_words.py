"""What is said of a run is what its readings allow, and the same keys are always there."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import Report, report_of
from headrace.telemetry.words import as_object, figures, overlap, parts, title
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


def said(run: Run, *among: Run) -> dict[str, str]:
    return dict(figures(report(run, *among)))


def contradictory() -> Run:
    run = streamed()
    owner = (at("granted", 9_000), *run.owner[1:])
    return replace(run, owner=owner)


def test_what_is_said_of_a_streamed_run() -> None:
    assert said(streamed(), whole()) == {
        "clocks": "one clock (readings agree within 65 us)",
        "prefill": "3.100 ms",
        "source": "2.600 ms computing, 0.510 ms writing",
        "host overlap": "0.400 ms of importing while the source worked (host intervals: nothing is "
        "claimed about kernels)",
        "imported early": "2.0 kB of 3.0 kB before the prefill ended (66.7 %)",
        "transfer tail": "0.800 ms from the end of the prefill to publishing; 0.790 ms from the "
        "end of the last layer group",
        "hidden share": "33.3 % of T = 1.200 ms, the imports of the whole route on the same "
        "prompt; all but the last layer group is 66.7 %",
        "drained in": "0.100 ms",
    }


def test_parts_of_the_tail() -> None:
    assert parts(report(streamed())) == [
        ("importing", "0.200 ms", "25.0 %"),
        ("decode steps of others", "0.300 ms", "37.5 %"),
        ("the source still at work", "0.010 ms", "1.2 %"),
        ("message under way", "0.030 ms", "3.8 %"),
        ("the rest: the owner wakes, checks, publishes", "0.260 ms", "32.5 %"),
    ]
    assert parts(report(cancelled())) == []


def test_a_tail_of_no_time_has_no_shares() -> None:
    instant = streamed(source=(at("final", 5),), owner=(at("published", 5),))
    assert {part[1:] for part in parts(report(instant))} == {("0.000 ms", "")}


def test_what_is_said_of_a_cancelled_run() -> None:
    assert said(cancelled()) == {
        "reason": "cancelled by the caller",
        "clocks": "one clock (readings agree within 70 us)",
        "source": "0.800 ms computing, 0.100 ms writing",
        "host overlap": "0.000 ms of importing while the source worked (host intervals: nothing is "
        "claimed about kernels)",
        "imported early": "n/a: the end of the prefill is not known; 1.0 kB were imported in all",
        "transfer tail": "n/a: nothing was published",
        "cancelled": "1.500 ms after the grant",
        "drained in": "0.890 ms",
    }


def test_what_the_first_token_gained() -> None:
    soon = measured(submitted_ns=1, first_token_ns=4_100_001)
    late = measured(submitted_ns=1, first_token_ns=5_600_001)
    told = said(streamed(measured=soon), whole(measured=late))
    assert told["TTFT saved"] == (
        "1.500 ms against the whole route on the same prompt (75.0 % of its tail of 2.000 ms)"
    )
    instant = (*whole().source[:-1], at("final", 5_000))
    told = said(streamed(measured=soon), whole(measured=late, source=instant))
    assert told["TTFT saved"].endswith("(it has no tail)")


def test_one_thread_is_told_as_one() -> None:
    told = said(local(), whole())
    assert told["host overlap"] == (
        "n/a: one process, one thread: the owner computed the prompt itself and imported in between"
    )
    assert told["hidden share"].startswith("n/a: one process, one thread")
    both = on("device", local(), "compute", "import")
    assert overlap(report(both))[1].startswith("n/a: one process, one thread")
    assert (as_object(report(both))["local"], as_object(report(both))["kernel_overlap_s"]) == (
        True,
        None,
    )


def test_several_layers_to_a_message_are_told_as_computing_and_writing() -> None:
    assert said(several())["source"] == (
        "0.200 ms computing, 2.600 ms computing and writing, several layers to a message"
    )
    told = as_object(report(several()))
    assert (told["compute_and_write_s"], told["write_s"]) == (0.0026, 0)


def test_sizes_have_their_unit() -> None:
    big = at("import", 10, 90, nbytes=35_340_000)
    run = streamed(owner=(big, at("published", 4_000)), measured=measured(kv_nbytes=70_680_000))
    assert said(run)["imported early"] == "35.3 MB of 70.7 MB before the prefill ended (50.0 %)"


def test_titles() -> None:
    assert title(report(streamed())) == "streamed: 8 prompt tokens, finished"
    chosen = streamed(name="auto", choice="a long prompt")
    assert title(report(chosen)) == "auto (streamed): 8 prompt tokens, finished"
    alone = "streamed: 8 prompt tokens, finished, computed by the owner itself"
    assert title(report(local())) == alone
    assert said(chosen)["route chosen"] == "a long prompt"


def test_kernels_are_claimed_from_two_device_clocks_beyond_their_errors() -> None:
    told = report(on_devices())
    assert overlap(told) == (
        "kernel overlap",
        "0.400 ms of importing while the source computed (between device events of both sides, "
        "gaps between kernels included, each stretch within 10.0 us; shorter ones are not counted)",
    )
    written = as_object(told)
    assert (written["evidence"], written["kernel_overlap_s"]) == ("device", 0.0004)
    assert (written["overlap_s"], written["overlap_error_s"]) == (0.0004, 1e-5)


def test_an_overlap_within_its_error_is_no_claim() -> None:
    told = report(on("device", streamed(), "compute", "import", error_us=100))
    assert overlap(told) == (
        "device overlap",
        "0.400 ms of importing while the source computed (between device events of both sides, "
        "gaps between kernels included, but no stretch beyond its error: nothing is claimed about "
        "kernels)",
    )
    assert as_object(told)["kernel_overlap_s"] is None
    assert as_object(told)["overlap_s"] == 0.0004


@pytest.mark.parametrize("real", [(), ("compute",), ("import",)])
def test_what_fake_devices_tell_is_told_as_theirs(real: tuple[str, ...]) -> None:
    fakes = on("fake", on_devices(), "compute", "write", "import")
    told = report(on("device", fakes, *real))
    assert overlap(told) == (
        "fake overlap",
        "0.400 ms of importing while the source computed (events of a fake device: nothing is "
        "claimed about kernels)",
    )
    assert (as_object(told)["evidence"], as_object(told)["kernel_overlap_s"]) == ("fake", None)
    one_side = report(on("host", fakes, "import"))
    assert overlap(one_side)[1].endswith(
        "(events of a fake device of one side, host intervals of the owner: nothing is claimed "
        "about kernels)"
    )
    assert dict(figures(one_side))["source"].endswith("writing, by events of a fake device")


def test_two_devices_that_took_turns() -> None:
    run = on_devices(owner=(at("import", 3_300, 3_400, clock="device", error_ns=5),))
    assert overlap(report(run)) == (
        "device overlap",
        "0.000 ms of importing while the source computed (between device events of both sides, "
        "gaps between kernels included)",
    )
    assert as_object(report(run))["kernel_overlap_s"] is None


@pytest.mark.parametrize(
    ("kinds", "grounds"),
    [
        ((), "host intervals"),
        (("write", "announced", "validated"), "host intervals"),
        (("compute", "write"), "device events of one side, host intervals of the owner"),
        (("import",), "device events of one side, host intervals of the source"),
    ],
)
def test_a_host_side_is_named_and_nothing_claimed(kinds: tuple[str, ...], grounds: str) -> None:
    mixed = report(on("device", streamed(), *kinds))
    assert overlap(mixed) == (
        "host overlap",
        f"0.400 ms of importing while the source worked ({grounds}: nothing is claimed about "
        "kernels)",
    )
    assert as_object(mixed)["kernel_overlap_s"] is None
    assert as_object(mixed)["evidence"] == "host"


def test_what_a_source_did_by_device_events_is_told_as_such() -> None:
    assert said(on_devices())["source"] == (
        "2.600 ms computing, 0.510 ms writing, by device events"
    )


@pytest.mark.parametrize(
    ("by_ns", "side"), [(2_000_000_000, "ahead of"), (-2_000_000_000, "behind")]
)
def test_a_shift_is_told(by_ns: int, side: str) -> None:
    run = streamed()
    text = said(replace(run, source=moved(run.source, by_ns)))["clocks"]
    assert text.startswith("two clocks: the source's is ")
    assert f" s {side} the owner's (within 65 us)" in text
    assert "shifted before anything was computed" in text
    seconds = float(text.removeprefix("two clocks: the source's is ").split()[0])
    assert abs(seconds - 2) < 1e-4


def test_clocks_that_contradict_each_other() -> None:
    told = said(contradictory())
    assert told["clocks"] == "no offset fits all messages: times of the two sides are not compared"
    for name in ("host overlap", "transfer tail", "imported early"):
        assert told[name].startswith("n/a: the two clocks contradict each other")
    assert "hidden share" not in told


def test_clocks_that_could_not_be_checked() -> None:
    assert said(cancelled(owner=()))["clocks"].startswith("not checked: ")


def test_a_tail_backwards() -> None:
    told = said(streamed(source=(at("final", 9),), owner=(at("published", 5),)))
    assert told["transfer tail"].startswith(
        "n/a: these readings do not have the end of the prefill"
    )


def test_no_last_group_and_no_bytes() -> None:
    told = said(
        streamed(
            source=(at("final", 5),),
            owner=(at("published", 9),),
            measured=measured(kv_nbytes=0),
        )
    )
    assert told["transfer tail"] == "0.004 ms from the end of the prefill to publishing"
    assert told["imported early"] == "0.0 kB of 0.0 kB before the prefill ended"


def test_a_share_below_the_noise() -> None:
    owner = (at("import", 10, 40), at("published", 4_000))
    assert said(streamed(owner=owner))["hidden share"] == (
        "n/a: T = 0.030 ms, this run's own imports (no whole-route run to compare with), "
        "is below 0.100 ms: wake-ups of processes decide there"
    )


def test_a_share_without_a_bound() -> None:
    run = streamed(measured=None)
    assert "all but" not in said(run)["hidden share"]


def test_the_object_has_the_same_keys_for_every_run() -> None:
    full, empty = as_object(report(streamed())), as_object(report(cancelled(source=(), owner=())))
    assert list(full) == list(empty)
    assert full == json.loads(json.dumps(full))
    assert full["transfer_tail_s"] == 800 * US / 1e9
    assert full["tail_parts_s"]["importing"] == 200 * US / 1e9
    assert full["evidence"] == "host"
    assert (full["alone_from"], full["clocks"]) == ("own imports", "one")
    assert empty["tail_parts_s"] == {}
    assert empty["clocks"] == "unchecked"
    nothing = ("transfer_tail_s", "hidden_share", "alone_s", "prefill_s", "drain_s")
    assert {empty[name] for name in nothing} == {None}


def test_parked_time_is_said_apart_from_the_tail() -> None:
    told = said(parked())
    assert told["parked"] == "6.000 ms in its slot, waiting for the lane: no part of the tail"
    assert told["transfer tail"].startswith(
        "0.800 ms from the end of the prefill, or of parking if that was later, to publishing"
    )
    assert "parked" not in said(streamed())
    assert as_object(report(parked()))["parked_s"] == 0.006
    assert as_object(report(streamed()))["parked_s"] is None
