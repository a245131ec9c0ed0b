"""A streamed hand-off from the GPU to the GPU, by both devices' clocks, kept for `headrace trace`.

Whether compute and imports overlapped is said by the rule of `headrace.telemetry.claim` and by
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from headrace.bench.device.models import MEASURED
from headrace.bench.device.place import Place
from headrace.bench.families import random_prompt
from headrace.bench.rows import stamp
from headrace.bench.stand import Stand
from headrace.errors import Refused
from headrace.messages import AskedRoute
from headrace.runtime.requests import RequestOptions
from headrace.telemetry.chrome import encode
from headrace.telemetry.clocks import align
from headrace.telemetry.recording import Recording, Run, Stamp, prompt_digest
from headrace.telemetry.report import Report, report_of

ROUTES: Final[tuple[AskedRoute, ...]] = ("whole", "streamed")
FILE: Final = "trace.json"
TOKENS: Final = 2
_STAMPED: Final = ("headrace", "commit", "dirty", "time", "cpu", "kernel", "python")


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """`trace.json`, and a row for each route. Raises: Refused without the model."""
    directory, num_tokens = place.model(MEASURED), place.sizes.trace_prompt
    if not directory.is_dir():
        raise Refused(f"the model {MEASURED} was not made")
    with place.stand(directory, num_tokens + TOKENS) as stand:
        prompt = random_prompt(num_tokens, stand.decoder.manifest().vocab_size)
        for route in ROUTES:  # what is done once in a process is done
            _traced(stand, route, prompt)
        runs = tuple(_traced(stand, route, prompt) for route in ROUTES)
    found = stamp()
    where: Stamp = {name: str(found[name]) for name in _STAMPED}
    where |= {"device": place.kind, "model": MEASURED}
    (place.folder / FILE).write_bytes(encode(Recording(runs=runs, stamp=where)))
    file = place.rows(step)
    aligned = [align(each) for each in runs]
    for each in aligned:
        row = _row(report_of(each, aligned))
        say(str(file.append({**row, "model": MEASURED, "prompt_tokens": num_tokens})))


def _traced(stand: Stand, route: AskedRoute, prompt: list[int]) -> Run:
    request = stand.serve(prompt, RequestOptions(route=route, max_tokens=TOKENS, trace=True))
    return Run(
        name=route,
        route=route,
        num_tokens=len(prompt),
        prompt=prompt_digest(prompt),
        outcome=request.outcome,
        source=tuple(request.source_intervals),
        owner=tuple(request.owner_intervals),
        measured=request.measured,
    )


def _row(report: Report) -> dict[str, Any]:
    overlap = report.overlap
    return {
        "measure": "trace",
        "route": report.route,
        "source_clock": overlap.source,
        "owner_clock": overlap.owner,
        "overlap_ns": report.overlap_ns,
        "error_ns": overlap.error_ns,
        "kernel_overlap_ns": report.kernel_overlap_ns,
        "compute_ns": report.compute_ns,
        "write_ns": report.write_ns,
        "prefill_ns": report.prefill_ns,
        "alone_ns": report.alone_ns,
        "tail_ns": report.tail_ns,
        "hidden_share": report.hidden_share,
        "bound": report.bound,
        "kv_nbytes": report.kv_nbytes,
    }
