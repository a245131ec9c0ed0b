"""What an engine does with one grant, step by step, and what it can do wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from headrace.ids import Span
from headrace.messages import Prefill
from headrace.plan import Plan

Spans = tuple[Span, ...]


class Step(NamedTuple):
    """One step of an engine: `check`, `emit` (write and commit), `final`, and its faults.

    commit: announces without writing. write: writes without announcing. spoil: leaves a wrong value
    in cells that were announced. stray: does so in another slot of the same slab. misstamp:
    announces with a wrong number of digests. raise, hang, leave: what they say.
    """

    what: Literal[
        "check",
        "emit",
        "final",
        "commit",
        "write",
        "spoil",
        "stray",
        "misstamp",
        "raise",
        "hang",
        "leave",
    ]
    spans: Spans = ()


def script(prefill: Prefill, plan: Plan, *, slow: bool) -> list[Step]:
    """The steps of an engine that does what it was asked to.

    `slow`: so much so that it says between any two steps that it is at work.
    """
    steps = [*_emissions(prefill, plan), Step("final")]
    if not slow:
        return steps
    return [said for step in steps if step.what != "check" for said in (Step("check"), step)]


def mistaken(fault: str, rest: list[Step], told: Spans, prefill: Prefill) -> list[Step]:
    """The steps that are left, once a fault came over the engine.

    `told`: the spans that were committed so far.
    """
    n, layers = prefill.num_tokens, len(rest)
    match fault:
        case "engine-raises":
            return [Step("raise")]
        case "engine-hangs":
            return [Step("hang")]
        case "engine-never-returns":
            return [*rest, Step("hang")]
        case "engine-no-final":
            return [Step("leave")]
        case "engine-commits-twice":
            again = told[-1:] or tuple(s for step in rest for s in step.spans)[:1] * 2
            return [Step("commit", again), *rest] if again else rest
        case "engine-writes-twice" if told:
            return [Step("emit", told[-1:]), *rest]
        case "engine-misstamps" if rest and rest[0].what == "emit":
            return [Step("misstamp", rest[0].spans), *rest]
        case "engine-commits-outside":
            odd = (Span(0, 1, n - 1, n + 1), Span(0, 99, 0, n), Span(0, 1, n, n))[layers % 3]
            return [Step("commit", (odd,)), *rest]
        case "engine-final-early":
            return [Step("final"), *rest]
        case "engine-goes-on-after-final":
            return [*rest, Step("emit", told[:1] or (Span(0, 1, 0, 1),)), Step("check")]
        case "engine-cuts-too-fine":
            return [fine for step in rest for fine in _finer(step)]
        case "engine-announces-early" if rest and rest[0].what == "emit":
            return [Step("commit", rest[0].spans), Step("write", rest[0].spans), *rest[1:]]
        case "engine-writes-late" if told:
            return [Step("spoil", told[-1:]), *rest]
        case "engine-writes-astray":
            return [Step("stray"), *rest]
        case _:
            return rest


def _finer(step: Step) -> Iterator[Step]:
    if step.what != "emit":
        yield step
        return
    for span in step.spans:
        for layer in range(span.layer_start, span.layer_stop):
            for position in range(span.start, span.stop):
                yield Step("emit", (Span(layer, layer + 1, position, position + 1),))


def _emissions(prefill: Prefill, plan: Plan) -> Iterator[Step]:
    stop = plan.num_tokens
    computed = prefill.prefill_chunk or stop
    everything = [range(len(plan.layers))]
    for begun in range(0, stop, computed):
        ended = min(begun + computed, stop)
        if prefill.route == "streamed":
            for group in plan.layer_groups(prefill.group_layers, prefill.emission):
                yield Step("check")
                yield from _cut(group, begun, ended, prefill.chunk)
        else:
            yield Step("check")
            if prefill.route == "chunked":
                yield from _cut(everything, begun, ended, prefill.chunk)
    if prefill.route == "whole":
        yield from _cut(everything, 0, stop, 0)


def _cut(
    group: list[range] | tuple[range, ...], start: int, stop: int, chunk: int
) -> Iterator[Step]:
    step = chunk or stop - start
    for at in range(start, stop, step):
        end = min(at + step, stop)
        yield Step("emit", tuple(Span(run.start, run.stop, at, end) for run in group))
