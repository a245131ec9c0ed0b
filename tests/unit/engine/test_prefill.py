"""When states are taken during a prefill, what is let go of, and how a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.backends import torch as torch_backend
from headrace.engine import loading
from headrace.engine.loading import load_model
from headrace.engine.prefill import TakenCache, run_prefill
from headrace.errors import Closed, LocalProtocolError, Refused
from headrace.geometry import Layer, Sliding
from headrace.messages import Route
from tests.e2e.families import (
    WINDOW,
    decoder_of,
    directory_of,
    make_prompt,
    make_sink,
    options,
    source_of,
)


class Recorder:
    """A taker that writes down what it is told."""

    def __init__(self, *, keep_full: bool) -> None:
        self.keep_full = keep_full
        self.told: list[tuple[Any, ...]] = []
        self.kept: list[list[int]] = []

    def begin(self, start: int, stop: int) -> None:
        self.told.append(("begin", start, stop))

    def take(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.told.append((layer, tuple(keys.shape), tuple(values.shape)))

    def end(self, start: int, stop: int, cache: TakenCache) -> None:
        self.told.append(("end", start, stop))
        self.kept.append(
            [
                0 if layer.keys is None else layer.keys.untyped_storage().nbytes()
                for layer in cache.layers
            ]
        )


def run(family: str, recorder: Recorder, num_tokens: int, prefill_chunk: int = 0) -> None:
    model = load_model(directory_of(family))
    layers = source_of(family).manifest().layers
    run_prefill(model, layers, make_prompt(num_tokens), prefill_chunk, recorder)


def test_layers_are_taken_in_order_and_only_with_new_rows() -> None:
    recorder = Recorder(keep_full=False)
    run("gemma3", recorder, 40, prefill_chunk=25)
    states = [(layer, (2, 25, 16), (2, 25, 16)) for layer in range(4)]
    rest = [(layer, (2, 15, 16), (2, 15, 16)) for layer in range(4)]
    assert recorder.told == [
        ("begin", 0, 25),
        *states,
        ("end", 0, 25),
        ("begin", 25, 40),
        *rest,
        ("end", 25, 40),
    ]


@pytest.mark.parametrize("keep_full", [True, False])
def test_storage_is_let_go_as_soon_as_nothing_reads_it(keep_full: bool) -> None:
    """Between chunks a sliding layer holds window - 1 rows and no more; at the end nothing is held
    that was not asked for.
    """
    recorder = Recorder(keep_full=keep_full)
    run("gemma3", recorder, 80, prefill_chunk=60)
    row = 2 * 16 * 4
    between, after = recorder.kept
    assert between == [(WINDOW - 1) * row, 60 * row] * 2
    assert after == [0, 80 * row if keep_full else 0] * 2


def test_layers_that_share_are_not_taken() -> None:
    recorder = Recorder(keep_full=False)
    run("gemma4_shared", recorder, 5)
    assert [entry[0] for entry in recorder.told] == ["begin", 0, 1, 2, "end"]


def test_wrong_geometry_stops_before_anything_is_written() -> None:
    """A config that lies about the heads is caught at the first tensor, with the slot untouched."""
    source, decoder = source_of("llama"), decoder_of("llama")

    def lying(layer: Layer) -> Layer:
        parts = tuple(msgspec.structs.replace(part, heads=3) for part in layer.parts)
        return msgspec.structs.replace(layer, parts=parts)

    wrong = tuple(lying(layer) for layer in source.manifest().layers)
    engine = torch_backend.TorchEngine(load_model(directory_of("llama")), 512)
    engine._manifest = msgspec.structs.replace(source.manifest(), layers=wrong)
    sink = make_sink(
        engine.manifest(),
        msgspec.structs.replace(decoder.manifest(), layers=wrong),
        options("streamed", 5),
    )
    before = bytes(sink.buffer)
    with pytest.raises(LocalProtocolError, match=r"layers\.0\.k: .*\(1, 2, 5, 16\).*\(1, 3, 5"):
        engine.prefill_stream(make_prompt(5), sink)
    assert bytes(sink.buffer) == before


def test_tokens_must_fit_the_plan_and_the_vocabulary() -> None:
    source = source_of("llama")
    sink = make_sink(source.manifest(), decoder_of("llama").manifest(), options("whole", 3))
    for tokens, start in (([3, 4], 0), ([3, 4, 5], 3), ([3, 4, 5], -1)):
        with pytest.raises(LocalProtocolError, match="the plan has 3"):
            source.prefill_stream(tokens, sink, start)
    with pytest.raises(LocalProtocolError, match=r"token ids in \[3, 128\]"):
        source.prefill_stream([3, 128, 4], sink)
    model = load_model(directory_of("llama"))
    with pytest.raises(LocalProtocolError, match="no tokens"):
        run_prefill(model, source.manifest().layers, [], 0, Recorder(keep_full=False))
    assert sink.num_writes == 0


def test_tokens_may_be_the_slots_own_words() -> None:
    """The prompt arrives as a view of u32 ids."""
    source = source_of("llama")
    prompt = make_prompt(5)
    words = memoryview(b"".join(token.to_bytes(4, "little") for token in prompt)).cast("I")
    logits = []
    for tokens in (prompt, words):
        sink = make_sink(source.manifest(), decoder_of("llama").manifest(), options("whole", 5))
        source.prefill_stream(tokens, sink)
        logits.append(sink.logits)
    assert logits[0] == logits[1]


def test_a_windows_first_rows_span_several_computed_chunks() -> None:
    """A decoder may need more rows than a cache keeps: they are taken as they are computed."""
    source, decoder = source_of("gemma3"), decoder_of("gemma3")

    def greedy_tail(layer: Layer) -> Layer:
        if not isinstance(layer.kind, Sliding):
            return layer
        return msgspec.structs.replace(layer, kind=Sliding(WINDOW, 30))

    needs = tuple(greedy_tail(layer) for layer in decoder.manifest().layers)
    manifest = msgspec.structs.replace(decoder.manifest(), layers=needs)
    cells = []
    routes: tuple[Route, ...] = ("whole", "chunked", "streamed")
    for route in routes:
        asked = options(route, 43, prefill_chunk=7)
        sink = make_sink(source.manifest(), manifest, asked)
        source.prefill_stream(make_prompt(43), sink)
        cells.append(sink.cells())
    assert cells[0] == cells[1] == cells[2]


def test_closed_engines_say_so() -> None:
    engine = torch_backend.open({"model": str(directory_of("llama"))})
    sink = make_sink(engine.manifest(), decoder_of("llama").manifest(), options("whole", 3))
    engine.close()
    with pytest.raises(Closed):
        engine.prefill_stream([3, 4, 5], sink)


def test_pairing_facts() -> None:
    facts = source_of("gemma2").facts
    assert facts["attention"] == "eager"  # softcapping: sdpa cannot
    assert source_of("llama").facts["attention"] == "sdpa"
    assert facts["threads"] == torch.get_num_threads() == 1
    assert {**facts, "decode_batch": 1} == decoder_of("gemma2").facts


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "missing required field `model`"),
        ({"model": 3}, r"`\$\.model`"),
        ({"model": "x", "lanse": 2}, "unknown field `lanse`"),
        ({"model": "x", "threads": 0}, r"`\$\.threads`"),
        ({"model": "x", "threads": "2"}, r"`\$\.threads`"),
        ({"model": "x", "max_positions": 0}, r"`\$\.max_positions`"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused, match=f"options of torch: .*{text}"):
        torch_backend.open(options)


def test_the_cache_is_called_what_this_version_calls_it() -> None:
    class Old:
        def forward(self, input_ids: Any, past_key_values: Any) -> None: ...

    class Cacheless:
        def forward(self, input_ids: Any) -> None: ...

    assert load_model(directory_of("llama")).cache_argument in ("cache", "past_key_values")
    assert loading._cache_argument(Old()) == "past_key_values"
    with pytest.raises(Refused, match=r"Cacheless\.forward takes no cache"):
        loading._cache_argument(Cacheless())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "int4"}, "dtype"),
        ({"threads": 0}, "threads"),
        ({"attention": "no_such"}, "model"),
        ({"device": "no_such"}, "device"),
    ],
)
def test_models_that_cannot_load_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(Refused) as caught:
        load_model(directory_of("llama"), **changes)
    assert caught.value.field == field


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match="does not load"):
        load_model(tmp_path)


def test_positions_past_the_models_are_refused() -> None:
    with pytest.raises(Refused, match="513"):
        torch_backend.open({"model": str(directory_of("llama")), "max_positions": 513})
