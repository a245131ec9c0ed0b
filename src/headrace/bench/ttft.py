"""Time to the first token by every route, on models that compute, alone and over emulated links.

A point is one model, prompt length, link and prefill chunk. At each point every route serves the
same prompt from an idle owner, all routes once in a repeat; the next repeat takes them in the
reverse order, the two after that begin with another route. Ratios are taken within a repeat.
The source computes in its own process, the decoder in this one, with one thread each.

`auto` has a source, a decoder and an owner of its own, which serve nothing else but one short
prompt before it: what it knows, its own requests at the points of one model and link taught it.
`nth` counts them at each point from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

from headrace.backends.load import open_decoder
from headrace.bench.cpu import first_thread_ns
from headrace.bench.families import random_prompt
from headrace.bench.links import LinkDecoder
from headrace.bench.rows import RowFile, busy_share
from headrace.bench.stand import RequestFailed, Stand, choice_of, load_1min, pairing_facts
from headrace.bench.ttft_points import AUTO, MARGIN, Cut, Point, Subject, cuts_of, order_of
from headrace.engine.text import max_positions_of
from headrace.errors import Refused
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

CLAIM = "ttft"
KEY = ("model", "prompt_tokens", "link_mb_s", "prefill_chunk", "label", "repeat")
LINK_CHUNK_NBYTES = 1 << 20  # of an import, so that a slow link is shared finely
LINK_LOOK_S = 2e-4  # between two looks at its fences: what a tail over a link may be too long by
WARM_UP = ("whole", "streamed-1")
AUTO_WARM_UP_TOKENS = 4

Missing = tuple[int, int, str]  # repeat, place in it, label


def check_points(points: Sequence[Point]) -> None:
    """Refuse a prompt that its model cannot hold."""
    for point in points:
        longest = max_positions_of(point.subject.directory)
        if point.num_tokens + MARGIN > longest:
            raise Refused(
                f"{point.subject.name} holds {longest} positions and a prompt of "
                f"{point.num_tokens} needs {point.num_tokens + MARGIN}; ask for shorter prompts",
                field="prompts",
            )


def run(points: Sequence[Point], file: RowFile) -> Iterator[dict[str, Any]]:
    """Measure what `file` does not hold yet, append it there, and yield each row.

    Points of one model and link that follow each other share their processes. Where those of
    `auto` have no room beside the others, a row says so.

    Raises:
        RequestFailed: a request did not finish.
    """
    together = groupby(points, key=lambda point: (point.subject, point.link_mb_s))
    for (subject, link_mb_s), group in together:
        mine = [(point, missing) for point in group if (missing := list(_missing(point, file)))]
        if not mine:
            continue
        with ExitStack() as stack:
            stands, refusal = _stands(subject, link_mb_s, mine, stack)
            for point, missing in mine:
                nth = 0
                for repeat, order, label in missing:
                    place = {"repeat": repeat, "order": order}
                    if label == AUTO and refusal:
                        file.append(_identity(point, label) | place | {"skipped": refusal})
                        continue
                    nth += label == AUTO
                    place["nth"] = nth if label == AUTO else 0
                    yield file.append(_one(stands[label == AUTO], point, label) | place)


def _stands(
    subject: Subject,
    link_mb_s: float,
    mine: Sequence[tuple[Point, Sequence[Missing]]],
    stack: ExitStack,
) -> tuple[dict[bool, Stand], str]:
    """What serves the missing rows, warm: False is for the fixed routes and True for `auto`.

    With it why there is nothing for `auto`, if there is no room for it.
    """
    context = max(point.num_tokens for point, _ in mine) + MARGIN
    needed = {label == AUTO for _, missing in mine for _, _, label in missing}
    stands: dict[bool, Stand] = {}
    for of_auto in sorted(needed):
        try:
            stand = stack.enter_context(_open(subject, context, link_mb_s))
        except Refused as exc:
            if not of_auto or not stands:
                raise
            return stands, str(exc)
        stands[of_auto] = stand
        if of_auto:
            few = random_prompt(AUTO_WARM_UP_TOKENS, subject.vocab_size)
            stand.serve(few, RequestOptions(max_tokens=1))
        else:
            _warm_up(stand, subject, min(point.num_tokens for point, _ in mine))
    return stands, ""


def _missing(point: Point, file: RowFile) -> Iterator[Missing]:
    for repeat in range(point.repeats):
        for order, label in enumerate(order_of(list(point.cuts), repeat)):
            if _identity(point, label) | {"repeat": repeat} not in file:
                yield repeat, order, label


def _open(subject: Subject, context: int, link_mb_s: float) -> Stand:
    options = {"model": str(subject.directory), "dtype": "float32", "threads": 1}
    with ExitStack() as undo:
        handle = SourceHandle("torch", options, num_slots=1)
        undo.callback(handle.close)
        handle.start()
        cpu = open_decoder("cpu", {**options, "lanes": 1, "context": context})
        undo.callback(cpu.close)
        same: dict[str, Any] = {"context": context, "facts": pairing_facts(cpu)}
        if link_mb_s:
            linked = LinkDecoder(cpu, link_mb_s * 1e6)
            stand = Stand(
                handle, linked, chunk_nbytes=LINK_CHUNK_NBYTES, look_s=LINK_LOOK_S, **same
            )
        else:
            stand = Stand(handle, cpu, **same)
        undo.pop_all()
        return stand


def _warm_up(stand: Stand, subject: Subject, num_tokens: int) -> None:
    """What is done once in a process is done."""
    prompt = random_prompt(num_tokens, subject.vocab_size)
    cuts = cuts_of(len(subject.layers), num_tokens)
    for label in WARM_UP:
        stand.serve(prompt, _options(cuts[label], 0))


def _options(cut: Cut, prefill_chunk: int) -> RequestOptions:
    return RequestOptions(
        route=cut.route,
        group_layers=cut.group_layers,
        chunk=cut.chunk,
        prefill_chunk=prefill_chunk,
        max_tokens=1,
    )


def _identity(point: Point, label: str) -> dict[str, Any]:
    return {
        "model": point.subject.name,
        "prompt_tokens": point.num_tokens,
        "link_mb_s": point.link_mb_s,
        "prefill_chunk": point.prefill_chunk,
        "label": label,
    }


def _one(stand: Stand, point: Point, label: str) -> dict[str, Any]:
    subject, cut = point.subject, point.cuts[label]
    prompt = random_prompt(point.num_tokens, subject.vocab_size)
    busy = busy_share(0.1)
    before_ns = first_thread_ns(stand.handle.pid)
    request = stand.serve(prompt, _options(cut, point.prefill_chunk))
    source_cpu_ns = first_thread_ns(stand.handle.pid) - before_ns
    return {
        **_identity(point, label),
        "family": subject.family,
        "layers": len(subject.layers),
        **cut._asdict(),
        **measured_of(request),
        "source_cpu_ns": source_cpu_ns,
        "choice": choice_of(request),
        "pairing": stand.facts,
        "busy_before": round(busy, 3),
        "load_1min": load_1min(),
    }


def measured_of(request: Request) -> dict[str, int]:
    """What a finished request took, in ns and bytes, as a row keeps it.

    Raises:
        RequestFailed: nothing was measured.
    """
    measured = request.measured
    if measured is None:
        raise RequestFailed(f"nothing was measured of a request: {request.reason}")
    return {
        "prefill_ns": measured.source_final_ns - measured.prefill_begun_ns,
        "ttft_ns": measured.first_token_ns - measured.submitted_ns,
        "tail_ns": measured.tail_ns,
        "tail_from_last_group_ns": measured.tail_from_last_group_ns,
        "kv_nbytes": measured.kv_nbytes,
        "last_group_nbytes": measured.last_group_nbytes,
        "nbytes_before_final": measured.nbytes_before_final,
        "groups": measured.groups,
        "imports": measured.imports,
        "import_ns": measured.import_ns,
        "decode_in_the_way_ns": measured.decode_in_the_way_ns,
        "parked_ns": measured.parked_ns,
    }
