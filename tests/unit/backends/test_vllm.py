"""The vLLM source over a made-up vLLM: what is asked of it, taken from it, and told of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.backends import vllm as backend
from headrace.backends.load import SOURCES
from headrace.backends.null import decoder_like
from headrace.backends.replay import open as open_replay
from headrace.engine.vllm.producing import HERE
from headrace.errors import Cancelled, Closed, LocalProtocolError, Refused
from headrace.geometry import Full, Sliding, check_manifest
from headrace.plan import compile_plan
from headrace.testing.sinks import MemorySink, ask
from tests.unit.backends.made_up_vllm import LONGEST, TOKEN, Cache, Engine, modules

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRY: dict[str, Any] = {
    "layers": 3,
    "heads": 2,
    "head_dim": 4,
    "dtype": "float32",
    "window": 6,
    "full_every": 3,
    "vocab_size": 32,
    "max_positions": LONGEST,
}
PROMPT = list(range(3, 14))
ROUTES: list[dict[str, Any]] = [
    {"route": "whole"},
    {"route": "chunked", "chunk": 3},
    {"route": "streamed", "group_layers": 2},
    {"route": "streamed", "emission": "cache_groups", "chunk": 2},
]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine(Cache(decoder_like(open_replay(GEOMETRY).manifest())))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in modules(engine).items():
        monkeypatch.setitem(sys.modules, name, module)
    before, HERE.cache = HERE.cache, None
    yield engine
    HERE.cache, HERE.failure = before, None
    HERE.end()


def opened(**options: Any) -> backend.VllmEngine:
    return backend.open({"model": "/models/it", **options})


def sink_of(engine: backend.VllmEngine, cancel_at: int | None = None, **asked: Any) -> MemorySink:
    plan = compile_plan(decoder_like(engine.manifest()), "token_major", len(PROMPT), LONGEST)
    return MemorySink(plan, ask(len(PROMPT), **asked), cancel_at=cancel_at)


def check_taken(made_up: Engine, sink: MemorySink) -> None:
    """Every cell that was asked for is what vLLM computed, and the token is vLLM's."""
    assert (sink.ended, sink.token, sink.logits) == (True, TOKEN, None)
    for (layer, part), nbytes in sink.cells().items():
        low = sink.plan.windows[layer][0]
        assert nbytes == made_up.states[layer, part, low:].contiguous().numpy().tobytes()
    assert not made_up.has_unfinished_requests()
    assert not HERE.at_work


# Opening.


def test_what_is_asked_of_vllm(made_up: Engine) -> None:
    opened(prefill_chunk=8, block_size=64, max_positions=20, threads=1)
    assert made_up.asked == {
        "model": "/models/it",
        "dtype": "float32",
        "max_model_len": 21,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 1,
        "block_size": 64,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "kv_transfer_config": {
            "kv_connector": "HeadraceConnector",
            "kv_connector_module_path": "headrace.vllm",
            "kv_role": "kv_producer",
        },
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "kv_cache_memory_bytes": 3 * 2 * 2 * 4 * 4 * (21 + 1024),
    }
    assert os.environ[backend.ROLE] == "1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_what_is_left_to_vllm_or_given_through(made_up: Engine) -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    opened(engine={"enforce_eager": False, "seed": 3, "kv_cache_memory_bytes": 9})
    assert "block_size" not in made_up.asked
    assert (made_up.asked["enforce_eager"], made_up.asked["seed"]) == (False, 3)
    assert made_up.asked["kv_cache_memory_bytes"] == 9
    assert made_up.asked["max_model_len"] == LONGEST
    assert made_up.asked["max_num_batched_tokens"] == LONGEST + 1
    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"


@pytest.mark.parametrize(
    ("changed", "row_nbytes"),
    [
        ({}, 3 * 2 * 2 * 4 * 4),
        ({"head_dim": 8, "global_head_dim": 16}, 3 * 2 * 2 * 16 * 4),
        ({"num_global_key_value_heads": 3}, 3 * 2 * 3 * 4 * 4),
        ({"num_key_value_heads": None}, 3 * 2 * 4 * 4 * 4),
    ],
)
def test_the_cache_has_room_for_the_widest_layers(
    made_up: Engine, changed: dict[str, Any], row_nbytes: int
) -> None:
    """vLLM would take half of the host's memory."""
    for name, value in changed.items():
        setattr(made_up.text, name, value)
    opened()
    assert made_up.asked["kv_cache_memory_bytes"] == row_nbytes * (LONGEST + 1 + 1024)
    opened(dtype="bfloat16")
    assert made_up.asked["kv_cache_memory_bytes"] == row_nbytes // 2 * (LONGEST + 1 + 1024)


def test_it_is_a_source_by_its_name() -> None:
    assert SOURCES["vllm"] == "headrace.backends.vllm:open"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"engine": {"max_num_seqs": 4, "dtype": "half"}}, "sets dtype, max_num_seqs, which the"),
        ({"engine": {"kv_transfer_config": None}}, "engine sets kv_transfer_config"),
        ({"prefil_chunk": 8}, "prefil_chunk"),
        ({"threads": 0}, "threads"),
    ],
)
def test_options_that_are_refused(made_up: Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        opened(**options)
    assert made_up.asked == {}
    assert backend.ROLE not in os.environ


def test_another_vllm_is_refused(made_up: Engine) -> None:
    vars(sys.modules["vllm"])["__version__"] = "0.30.1"
    with pytest.raises(Refused, match=r"vLLM 0\.30\.1"):
        opened()


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_what_vllm_refuses_is_refused_in_one_line(made_up: Engine, kind: type[Exception]) -> None:
    made_up.refuses = kind("1 validation error for VllmConfig\n\n  Value error, no such\n  more")
    with pytest.raises(Refused) as told:
        opened()
    text = "vLLM refuses it: 1 validation error for VllmConfig: Value error, no such"
    assert str(told.value) == text
    made_up.refuses = kind("no such thing")
    with pytest.raises(Refused, match=r"^vLLM refuses it: no such thing$"):
        opened()


def test_a_vllm_without_our_connector(made_up: Engine) -> None:
    made_up.connects = False
    with pytest.raises(LocalProtocolError, match="no connector in this process"):
        opened()


def test_what_the_source_says_of_itself(made_up: Engine) -> None:
    manifest = opened(max_positions=20).manifest()
    check_manifest(manifest, "source")
    assert (manifest.role, manifest.layouts, manifest.prefix) == (
        "source",
        ("token_major",),
        "none",
    )
    assert (manifest.first, manifest.max_positions) == ("token", 20)
    kinds = [layer.kind for layer in manifest.layers]
    assert kinds == [Sliding(6, 20), Sliding(6, 20), Full()]
    assert opened().manifest().max_positions == LONGEST - 1
    assert opened(max_positions=99).manifest().max_positions == LONGEST - 1


# Prefills.


@pytest.mark.parametrize("asked", ROUTES)
@pytest.mark.parametrize("chunk", [0, 4, 1])
def test_a_prompt_is_computed_by_chunks_and_taken(
    made_up: Engine, asked: dict[str, Any], chunk: int
) -> None:
    engine = opened(prefill_chunk=chunk)
    for _ in range(2):
        made_up.steps = 0
        sink = sink_of(engine, prefill_chunk=chunk, **asked)
        engine.prefill_stream(PROMPT, sink)
        assert made_up.steps == -(-len(PROMPT) // (chunk or LONGEST))
        check_taken(made_up, sink)
    assert made_up.aborted == ["headrace-1", "headrace-2"]


def test_a_request_is_dropped_by_the_name_that_it_was_given(made_up: Engine) -> None:
    made_up.renames = True
    engine = opened()
    engine.prefill_stream(PROMPT, sink_of(engine))
    assert made_up.aborted == ["headrace-1"]


def test_what_lingers_is_stepped_away(made_up: Engine) -> None:
    made_up.lingers = True
    engine = opened()
    for _ in range(2):
        sink = sink_of(engine)
        engine.prefill_stream(PROMPT, sink)
        check_taken(made_up, sink)


def test_chunks_that_come_to_the_same_are_the_same(made_up: Engine) -> None:
    engine = opened(prefill_chunk=32)
    for asked in (0, 11, 12, 32):
        sink = sink_of(engine, prefill_chunk=asked)
        engine.prefill_stream(PROMPT, sink)
        check_taken(made_up, sink)


@pytest.mark.parametrize(("chunk", "asked"), [(0, 4), (4, 0), (4, 3), (32, 10)])
def test_another_prefill_chunk_is_refused(made_up: Engine, chunk: int, asked: int) -> None:
    engine = opened(prefill_chunk=chunk)
    says = f"started with prefill_chunk {chunk} and the request asks for {asked}"
    with pytest.raises(Refused, match=says):
        engine.prefill_stream(PROMPT, sink_of(engine, prefill_chunk=asked))
    assert made_up.steps == 0


def test_cuts_of_its_own_are_refused(made_up: Engine) -> None:
    engine = opened()
    with pytest.raises(Refused, match="chunks of one length only"):
        engine.prefill_stream(PROMPT, sink_of(engine, cuts=(3,)))
    with pytest.raises(LocalProtocolError, match="the plan has 11"):
        engine.prefill_stream(PROMPT[1:], sink_of(engine))
    assert made_up.steps == 0


@pytest.mark.parametrize("asked", ROUTES)
def test_a_cancel_ends_after_its_step_and_leaves_the_engine_empty(
    made_up: Engine, asked: dict[str, Any]
) -> None:
    """At each call of the sink that an uncancelled prefill makes."""
    engine = opened(prefill_chunk=4)
    whole = sink_of(engine, prefill_chunk=4, **asked)
    engine.prefill_stream(PROMPT, whole)
    steps = []
    for cancel_at in range(whole.num_calls):
        made_up.steps = 0
        sink = sink_of(engine, cancel_at, prefill_chunk=4, **asked)
        with pytest.raises(Cancelled):
            engine.prefill_stream(PROMPT, sink)
        assert sink.num_refused == 1
        assert not made_up.has_unfinished_requests()
        assert not HERE.at_work
        steps.append(made_up.steps)
    assert steps[0] == 1
    assert steps == sorted(steps)
    again = sink_of(engine, prefill_chunk=4, **asked)
    engine.prefill_stream(PROMPT, again)
    check_taken(made_up, again)


def test_positions_that_vllm_did_not_tell(made_up: Engine) -> None:
    engine = opened(prefill_chunk=4)
    made_up.silent = {3}
    sink = sink_of(engine, prefill_chunk=4, route="streamed")
    with pytest.raises(LocalProtocolError, match="told 8 positions of 11"):
        engine.prefill_stream(PROMPT, sink)
    assert not sink.ended
    made_up.silent = {5}
    with pytest.raises(LocalProtocolError, match=r"from position 8, and \[0, 4\) was taken"):
        engine.prefill_stream(PROMPT, sink_of(engine, prefill_chunk=4, route="streamed"))
    assert not made_up.has_unfinished_requests()


def test_a_prompt_that_ends_without_a_token(made_up: Engine) -> None:
    engine, made_up.mute = opened(), True
    with pytest.raises(LocalProtocolError, match="without a token"):
        engine.prefill_stream(PROMPT, sink_of(engine))
    assert not HERE.at_work


def test_a_closed_engine_computes_nothing(made_up: Engine) -> None:
    engine = opened()
    engine.close()
    engine.close()
    assert made_up.ended
    with pytest.raises(Closed):
        engine.prefill_stream(PROMPT, sink_of(engine))
