"""The torch prefill engine: a transformers model that writes its cache into a slot as it computes.

What the three routes share is the computation; they differ only in when a layer's states, final at
its cache update, are copied into the slot and announced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, assert_never

import torch
from msgspec import Meta, Struct

from headrace.backends.base import Cells, PrefillSink, SpanWriter
from headrace.backends.options import read_options
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.prefill import TakenCache, Taker, run_prefill
from headrace.engine.tensors import as_bytes, copy_in
from headrace.errors import Closed, LocalProtocolError, Refused
from headrace.geometry import Full, Manifest, Sliding
from headrace.ids import Span
from headrace.plan import Plan

States = tuple[torch.Tensor, torch.Tensor]


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. attn: the attention implementation, by
    default the model's best. max_positions: the longest prompt, by default the model's longest.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    device: str = "cpu"
    max_positions: Annotated[int, Meta(ge=1)] | None = None


def open(config: Mapping[str, Any]) -> TorchEngine:
    """Load the engine from the fields of `Options`.

    Raises:
        Refused: an option is unknown or wrong, or the model's cache is not supported.
    """
    options = read_options(config, Options, "torch")
    model = load_model(
        Path(options.model),
        dtype=options.dtype,
        threads=options.threads,
        attention=options.attn,
        device=options.device,
    )
    return TorchEngine(model, options.max_positions or model.max_positions)


class TorchEngine:
    """Prefills one prompt at a time on one device."""

    def __init__(self, model: LoadedModel, max_positions: int) -> None:
        if max_positions > model.max_positions:
            raise Refused(
                f"max_positions is {max_positions}, the model was made for {model.max_positions}",
                field="max_positions",
            )
        self._model: LoadedModel | None = model
        self._manifest = manifest(
            model.config, model.directory, "source", model.dtype, max_positions
        )
        self.facts = model.pairing_facts("DynamicCache")

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """Compute the prompt and put positions [start, n) of its cache and the logits into `sink`.

        All of the prompt is computed: what `start` saves is the moving of the first cells.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the tokens or `start` do not fit the plan or the model.
        """
        if self._model is None:
            raise Closed("the torch engine was closed")
        num_tokens = sink.plan.num_tokens
        if len(tokens) != num_tokens or not 0 <= start < num_tokens:
            raise LocalProtocolError(
                f"{len(tokens)} tokens from position {start}, the plan has {num_tokens}"
            )
        route = _route(sink, start)
        logits, ready_ns = run_prefill(
            self._model, self._manifest.layers, tokens, sink.options.prefill_chunk, route
        )
        route.finish()
        sink.final(as_bytes(logits), ready_ns=ready_ns)

    def close(self) -> None:
        self._model = None


def _route(sink: PrefillSink, start: int) -> _Streamed | _Kept:
    match sink.options.route:
        case "streamed":
            return _Streamed(sink, start)
        case "chunked":
            return _Kept(sink, start, by_chunk=True)
        case "whole":
            return _Kept(sink, start, by_chunk=False)
        case unknown:
            assert_never(unknown)


@dataclass
class _Batch:
    """The spans of one layer group and one transfer chunk, announced together."""

    spans: tuple[Span, ...]
    writer: SpanWriter | None = None


@dataclass
class _Group:
    """One layer group of the positions being computed; final when layer `last` is."""

    last: int
    batches: list[_Batch] = field(default_factory=list)


class _Streamed(Taker):
    """Each layer is copied at its cache update, each layer group announced with its last layer."""

    keep_full = False

    def __init__(self, sink: PrefillSink, start: int) -> None:
        self._sink = sink
        self._start = start
        plan, options = sink.plan, sink.options
        size = options.group_layers or len(plan.layers)
        self._layer_groups = plan.layer_groups(size, options.emission)
        self._computed = 0
        self._group_of: dict[int, _Group] = {}

    def begin(self, start: int, stop: int) -> None:
        self._computed = start
        self._group_of = {}
        plan = self._sink.plan
        for runs in self._layer_groups:
            members = [
                layer
                for run in runs
                for layer in run
                if _has_cells(plan, layer, max(start, self._start), stop)
            ]
            if members:
                group = _Group(members[-1])
                for first, last in _cut(self._sink, max(start, self._start), stop):
                    spans = (Span(run.start, run.stop, first, last) for run in runs)
                    batch = tuple(span for span in spans if plan.span_nbytes(span))
                    if batch:
                        group.batches.append(_Batch(batch))
                self._group_of.update(dict.fromkeys(members, group))

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._sink.check()
        group = self._group_of.get(layer)
        if group is None:
            return
        for batch in group.batches:
            if batch.writer is None:
                batch.writer = self._sink.write(*batch.spans)
            _fill(self._sink, batch.writer.cells(layer), (keys, values), self._computed)
            if layer == group.last:
                batch.writer.commit()
                batch.writer = None

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        self._group_of = {}

    def finish(self) -> None:
        pass


class _Kept(Taker):
    """States are kept and all layers are emitted by position, when computed or at the very end."""

    keep_full = True

    def __init__(self, sink: PrefillSink, start: int, *, by_chunk: bool) -> None:
        self._sink = sink
        self._start = start
        self._by_chunk = by_chunk
        self._computed = 0
        self._tails: dict[int, list[tuple[int, States]]] = {}
        self._full: dict[int, States] = {}

    def begin(self, start: int, stop: int) -> None:
        self._computed = start

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._sink.check()
        # A sliding layer's cache may keep fewer rows than the transfer set asks for, and a view of
        # them would pin the storage of all rows: its live rows are copied out now.
        plan = self._sink.plan
        if isinstance(plan.layers[layer].kind, Sliding):
            first = max(plan.windows[layer][0], self._computed)
            at = first - self._computed
            if at < keys.shape[1]:
                tail = keys[:, at:].clone(), values[:, at:].clone()
                self._tails.setdefault(layer, []).append((first, tail))

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        plan = self._sink.plan
        if self._by_chunk or stop == plan.num_tokens:
            for layer in plan.layers:
                if isinstance(layer.kind, Full):
                    self._full[layer.index] = cache.states(layer.index)
        if self._by_chunk:
            for first, last in _cut(self._sink, max(start, self._start), stop):
                self._emit(first, last)
            self._tails.clear()
            self._full.clear()

    def finish(self) -> None:
        if not self._by_chunk:
            self._emit(self._start, self._sink.plan.num_tokens)

    def _emit(self, first: int, last: int) -> None:
        span = Span(0, len(self._sink.plan.layers), first, last)
        if not self._sink.plan.span_nbytes(span):
            return
        writer = self._sink.write(span)
        for layer in range(len(self._sink.plan.layers)):
            cells = writer.cells(layer)
            if layer in self._full:
                _fill(self._sink, cells, self._full[layer], 0)
            for start, states in self._tails.get(layer, ()):
                _fill(self._sink, cells, states, start)
        writer.commit()


def _fill(sink: PrefillSink, cells: Sequence[Cells], states: States, start: int) -> None:
    for place in cells:
        parts = sink.plan.layers[place.layer].parts
        copy_in(place, parts, sink.plan.layout, states[place.part], start)


def _cut(sink: PrefillSink, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Positions [start, stop) by the transfer chunk."""
    step = sink.options.chunk or max(1, stop - start)
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _has_cells(plan: Plan, layer: int, start: int, stop: int) -> bool:
    lo, hi = plan.windows[layer]
    return max(lo, start) < min(hi, stop)
