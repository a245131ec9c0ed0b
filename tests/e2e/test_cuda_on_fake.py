"""The CUDA source and the CUDA decoder, each on a device model, as a pair of processes.

To the last bit they give what the CPU's pair gives, and a trace tells what may be claimed of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.backends.load import open_decoder
from headrace.messages import Route
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Run
from headrace.telemetry.report import report_of
from headrace.telemetry.words import overlap
from tests.e2e.families import CONTEXT, directory_of, make_prompt

FAKE = "headrace.testing.fake_device"
NUM_TOKENS = 43
ROUTES: tuple[Route, ...] = ("whole", "chunked", "streamed")


@contextmanager
def pair(family: str, source: str, decoder: str, **fake: Any) -> Iterator[DecoderOwner]:
    model: Mapping[str, Any] = {"model": str(directory_of(family)), "threads": 1}
    of_fakes = {name: fake if name.startswith(FAKE) else {} for name in (source, decoder)}
    lanes = {"lanes": 2, "context": CONTEXT}
    owner = DecoderOwner(
        open_decoder(decoder, {**model, **lanes, **of_fakes[decoder]}), context=CONTEXT
    )
    try:
        handle = SourceHandle(source, {**model, **of_fakes[source]})
        handle.start()
        owner.attach(handle)
        yield owner
        assert owner.drain()
        owner.check_integrity()
    finally:
        owner.close()


def served(owner: DecoderOwner, route: Route, **changes: Any) -> Request:
    asked: dict[str, Any] = {"route": route, "max_tokens": 4, "audit": True, "group_layers": 1}
    request = owner.submit(make_prompt(NUM_TOKENS), RequestOptions(**asked | changes))
    owner.run_until_done(request)
    assert request.outcome == "finished", request.reason
    return request


def facts(request: Request) -> tuple[object, ...]:
    return request.tokens, request.logits_digest, request.kv_digests


@pytest.mark.parametrize("failing_pin", [0, 1, 3], ids=["pinned", "pageable", "pinned at first"])
def test_it_gives_what_the_cpu_gives(failing_pin: int) -> None:
    with pair("gemma3", "torch", "cpu") as owner:
        wanted = facts(served(owner, "whole", prefill_chunk=17))
    fakes = f"{FAKE}:open_source", f"{FAKE}:open_decoder"
    with pair("gemma3", *fakes, failing_pin=failing_pin, polls_per_step=2) as owner:
        for route in ROUTES:
            for digest in (False, True):
                request = served(owner, route, prefill_chunk=17, chunk=11, digest=digest)
                assert facts(request) == wanted


@pytest.mark.parametrize(
    ("source", "decoder", "says"),
    [
        (f"{FAKE}:open_source", f"{FAKE}:open_decoder", "fake overlap"),
        (f"{FAKE}:open_source", "cpu", "host overlap"),
        ("torch", f"{FAKE}:open_decoder", "host overlap"),
    ],
)
def test_a_trace_tells_which_side_was_read_from_a_device(
    source: str, decoder: str, says: str
) -> None:
    with pair("llama", source, decoder) as owner:
        request = served(owner, "streamed", trace=True, prefill_chunk=9)
    told = {
        "source": {each.clock for each in request.source_intervals if each.kind == "compute"},
        "owner": {each.clock for each in request.owner_intervals if each.kind == "import"},
    }
    assert told == {
        "source": {"fake" if source.startswith(FAKE) else "host"},
        "owner": {"fake" if decoder.startswith(FAKE) else "host"},
    }
    run = Run(
        name="streamed",
        route="streamed",
        num_tokens=NUM_TOKENS,
        outcome=request.outcome,
        source=tuple(request.source_intervals),
        owner=tuple(request.owner_intervals),
        measured=request.measured,
    )
    report = report_of(align(run))
    assert report.clock.verdict == "one"
    assert (report.overlap.source, report.overlap.owner) == (
        *told["source"],
        *told["owner"],
    )
    name, text = overlap(report)
    assert name == says
    assert "nothing is claimed about kernels" in text
    assert report.kernel_overlap_ns is None
    assert sum(report.parts_ns.values()) == report.tail_ns
