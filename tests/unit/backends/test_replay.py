"""The replay engine: bytes that tell prompt, layer, part, head and position, however cut."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.backends import replay
from headrace.backends.null import decoder_like
from headrace.backends.replay import ReplayEngine
from headrace.backends.replay import open as open_replay
from headrace.errors import LocalProtocolError, Refused
from headrace.geometry import Emission, Full, Layout, PrefixUse, Sliding
from headrace.ids import Span
from headrace.messages import Prefill
from headrace.plan import compile_plan
from headrace.testing.sinks import MemorySink, MemoryWriter, ask

GEOMETRY: dict[str, Any] = {"layers": 5, "heads": 3, "head_dim": 4, "window": 6, "full_every": 2}
NUM_TOKENS = 23


def run(engine: ReplayEngine, tokens: Sequence[int], asked: Prefill | None = None) -> MemorySink:
    manifest = engine.manifest()
    asked = asked or ask(len(tokens))
    decoder, layout = decoder_like(manifest), manifest.layouts[0]
    sink = MemorySink(compile_plan(decoder, layout, len(tokens), 64, asked.start), asked)
    engine.prefill_stream(tokens, sink, asked.start)
    return sink


def prompt(num_tokens: int = NUM_TOKENS, seed: int = 0) -> list[int]:
    return [(seed + at * 5) % 32 for at in range(num_tokens)]


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.sampled_from(["head_major", "token_major"]),
    st.sampled_from(["whole", "chunked", "streamed"]),
    st.integers(1, 7),
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from(["layers", "cache_groups"]),
    st.integers(1, NUM_TOKENS),
)
def test_the_bytes_are_the_same_however_they_are_cut(
    layout: Layout,
    route: Any,
    group_layers: int,
    chunk: int,
    prefill_chunk: int,
    emission: Emission,
    num_tokens: int,
) -> None:
    engine = open_replay({**GEOMETRY, "layout": layout})
    tokens = prompt(num_tokens)
    asked = ask(
        num_tokens,
        route,
        group_layers=group_layers,
        chunk=chunk,
        prefill_chunk=prefill_chunk,
        emission=emission,
    )
    whole, cut = run(engine, tokens), run(engine, tokens, asked)
    assert (cut.cells(), cut.logits) == (whole.cells(), whole.logits)
    assert not cut.stray_bytes()


def rows_of(sink: MemorySink) -> dict[tuple[int, int, int, int], bytes]:
    """The bytes of each (layer, part, head, position), head_major."""
    found = {}
    for (layer, part), region in sink.regions().items():
        lo, hi = sink.windows[layer]
        nbytes = region.row_nbytes // (hi - lo)
        for head in range(region.rows):
            for at in range(hi - lo):
                begin = region.offset + head * region.stride + at * nbytes
                found[layer, part, head, lo + at] = bytes(sink.buffer[begin : begin + nbytes])
    return found


def test_no_two_cells_of_a_prompt_are_equal() -> None:
    """A cell in another's place is seen."""
    rows = rows_of(run(open_replay({**GEOMETRY, "head_dim": 16}), prompt()))
    assert len(set(rows.values())) == len(rows)


def test_every_cell_differs_from_prompt_to_prompt() -> None:
    engine = open_replay({**GEOMETRY, "head_dim": 16})
    one, other = (rows_of(run(engine, prompt(seed=seed))) for seed in (0, 1))
    assert one.keys() == other.keys()
    assert all(one[key] != other[key] for key in one)
    assert run(engine, prompt(seed=0)).logits != run(engine, prompt(seed=1)).logits


def test_two_processes_would_agree() -> None:
    """Nothing depends on an engine's past or on a process's hash seed."""
    first, second = open_replay(GEOMETRY), open_replay(GEOMETRY)
    run(second, prompt(seed=9))
    assert run(first, prompt()).cells() == run(second, prompt()).cells()


def test_rows_longer_than_the_noise() -> None:
    engine = open_replay({"layers": 1, "heads": 1, "head_dim": 1 << 16})
    sink = run(engine, prompt(20))
    cells = sink.cells()[0, 0]
    assert len(cells) == 20 * 2 * (1 << 16) > 1_048_573
    assert sink.cells() == run(engine, prompt(20), ask(20, "chunked", chunk=3)).cells()


def test_its_manifest_is_the_geometry_asked_for() -> None:
    manifest = open_replay({**GEOMETRY, "dtype": "bfloat16", "layout": "token_major"}).manifest()
    kinds = [layer.kind for layer in manifest.layers]
    assert kinds == [Sliding(6, 1 << 20), Full(), Sliding(6, 1 << 20), Full(), Sliding(6, 1 << 20)]
    assert [layer.name for layer in manifest.layers] == [f"layers.{at}" for at in range(5)]
    assert manifest.layouts == ("token_major",)
    (key, value) = manifest.layers[0].parts
    assert (key.name, value.name, key.heads, key.head_dim) == ("k", "v", 3, 4)
    assert key.dtype == "bfloat16"
    assert open_replay({"layers": 1}).manifest().layers[0].kind == Full()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(Refused, match="unknown dtype 'float3'") as caught:
        open_replay({"dtype": "float3"})
    assert caught.value.field == "dtype"
    with pytest.raises(Refused, match="unknown field"):
        open_replay({"layerz": 3})
    with pytest.raises(Refused, match="layout"):
        open_replay({"layout": "sideways"})
    with pytest.raises(Refused, match="writes_beside needs a layer_ms"):
        open_replay({"writes_beside": True})
    for wrong in ({"full_every": 0}, {"full_every": -1}, {"layer_ms": -0.5}):
        with pytest.raises(Refused, match="full_every must be at least 1"):
            open_replay(wrong)


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_it_says_in_each_layer_that_it_is_at_work(route: Any) -> None:
    calls = run(open_replay(GEOMETRY), prompt(), ask(NUM_TOKENS, route)).calls
    assert calls.count("check") == GEOMETRY["layers"]
    assert calls[0] == "check"
    if route != "streamed":
        assert calls.index("write") == GEOMETRY["layers"]


@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_it_fails_where_it_is_told_to(route: Any) -> None:
    engine = open_replay({**GEOMETRY, "fail_at_layer": 3})
    with pytest.raises(RuntimeError, match="fail at layer 3"):
        run(engine, prompt(), ask(NUM_TOKENS, route))


@pytest.mark.parametrize("prefill_chunk", [0, 5])
def test_its_pace_is_the_time_asked_for(prefill_chunk: int) -> None:
    """Per layer, in proportion to the positions computed: chunks take no longer in all."""
    engine = open_replay({**GEOMETRY, "layer_ms": 8.0})
    begun_s = time.monotonic()
    run(engine, prompt(), ask(NUM_TOKENS, "streamed", prefill_chunk=prefill_chunk))
    assert 0.040 <= time.monotonic() - begun_s < 0.4
    engine.close()


class Clock:
    """Stands in for the engine's module `time`: time passes by sleeping and by writing only."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_ns += round(seconds * 1e9)


class SlowSink(MemorySink):
    """Takes `write_ms` for each writer; keeps when each was asked for, and the final's time."""

    def __init__(self, clock: Clock, write_ms: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.clock, self.write_ms = clock, write_ms
        self.written_ms: list[float] = []
        self.begun_ns = clock.now_ns
        self.ready_ms = -1.0

    def write(self, *spans: Span) -> MemoryWriter:
        self.written_ms.append((self.clock.now_ns - self.begun_ns) / 1e6)
        self.clock.now_ns += round(self.write_ms * 1e6)
        return super().write(*spans)

    def final(self, logits: Any, *, token: Any = None, ready_ns: int | None = None) -> None:
        assert ready_ns is not None
        self.ready_ms = (ready_ns - self.begun_ns) / 1e6
        super().final(logits, token=token, ready_ns=ready_ns)


def paced(monkeypatch: pytest.MonkeyPatch, write_ms: float, asked: Prefill) -> SlowSink:
    """A prefill of five layers of 8 ms, by a clock of its own."""
    clock = Clock()
    monkeypatch.setattr(replay, "time", clock)
    engine = open_replay({**GEOMETRY, "layer_ms": 8.0, "writes_beside": True})
    manifest = engine.manifest()
    plan = compile_plan(decoder_like(manifest), manifest.layouts[0], NUM_TOKENS, 64)
    sink = SlowSink(clock, write_ms, plan, asked)
    engine.prefill_stream(prompt(), sink)
    return sink


def test_writing_runs_inside_the_time_of_later_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = paced(monkeypatch, 5.0, ask(NUM_TOKENS, "streamed"))
    assert sink.written_ms == pytest.approx([8, 16, 24, 32, 40])
    assert sink.calls.count("check") == GEOMETRY["layers"]


def test_writing_that_is_slower_than_computing_lags_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = paced(monkeypatch, 10.0, ask(NUM_TOKENS, "streamed"))
    assert sink.written_ms == pytest.approx([8, 18, 28, 38, 48])
    assert sink.ready_ms == pytest.approx(40)


@pytest.mark.parametrize("write_ms", [0.0, 5.0, 10.0])
@pytest.mark.parametrize("prefill_chunk", [0, 4])
@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
def test_the_computing_ends_at_the_same_time_on_all_routes(
    monkeypatch: pytest.MonkeyPatch, route: Any, prefill_chunk: int, write_ms: float
) -> None:
    sink = paced(monkeypatch, write_ms, ask(NUM_TOKENS, route, prefill_chunk=prefill_chunk))
    assert sink.ready_ms == pytest.approx(40)


@pytest.mark.parametrize("prefix", ["recompute", "own_cache"])
@pytest.mark.parametrize("route", ["whole", "chunked", "streamed"])
@pytest.mark.parametrize("start", [1, 5, 6, 7, 17, NUM_TOKENS - 1])
def test_a_late_start_gives_the_same_bytes(prefix: PrefixUse, route: Any, start: int) -> None:
    engine = open_replay({**GEOMETRY, "prefix": prefix})
    assert engine.manifest().prefix == prefix
    whole = rows_of(run(engine, prompt()))
    asked = ask(
        NUM_TOKENS, route, group_layers=2, chunk=4, prefill_chunk=7, start=start, cuts=(start,)
    )
    late = run(engine, prompt(), asked)
    assert late.ended
    assert not late.stray_bytes()
    assert rows_of(late) == {key: row for key, row in whole.items() if key[3] >= start}


def test_only_an_own_cache_saves_the_time_of_the_first_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for prefix, seconds in (("recompute", 0.4), ("own_cache", 0.1)):
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        engine = open_replay({**GEOMETRY, "layers": 4, "layer_ms": 100, "prefix": prefix})
        run(engine, prompt(20), ask(20, "streamed", start=15, cuts=(15,)))
        assert sum(slept) == pytest.approx(seconds)


def test_a_start_that_is_not_the_plans() -> None:
    engine = open_replay(GEOMETRY)
    plan = compile_plan(decoder_like(engine.manifest()), "head_major", 9, 64, 3)
    for start in (0, 4):
        with pytest.raises(LocalProtocolError, match="the plan begins at 3"):
            engine.prefill_stream(prompt(9), MemorySink(plan, ask(9, start=3, cuts=(3,))), start)
