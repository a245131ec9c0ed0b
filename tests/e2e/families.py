"""Tiny random models of the supported families, and a slot and a sink to run them through.

Weights are drawn with a spread at which greedy tokens vary from step to step, so that a cell in the
wrong place changes the tokens and not only the last bits of the logits.
"""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.backends import cpu as cpu_backend
from headrace.backends import torch as torch_backend
from headrace.backends.base import Cells, Decoder, Entry, PrefillEngine, SlotView
from headrace.coverage import Coverage
from headrace.engine.loading import load_model
from headrace.errors import Cancelled, LocalProtocolError
from headrace.geometry import Emission, Layout, Manifest, agree
from headrace.ids import AttemptId, Span
from headrace.messages import Prefill, Route
from headrace.plan import Plan, compile_plan

WINDOW = 16
VOCAB = 128
CONTEXT = 128
SEED = 20

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "exaone4": (
        "Exaone4Config",
        {
            "sliding_window": WINDOW,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": WINDOW, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "intermediate_size": [64] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
        },
    ),
    "gemma4": ("Gemma4TextConfig", {**_GEMMA4, "num_kv_shared_layers": 0}),
    "gemma4_shared": ("Gemma4TextConfig", {**_GEMMA4, "num_kv_shared_layers": 3}),
    "gemma4_k_eq_v": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
"""Name to configuration class and what differs from the common tiny shape."""

UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ),
}


def make_model(directory: Path, config_class: str, options: dict[str, Any]) -> None:
    """Make a random model and save it as config.json and safetensors."""
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, config_class)(**{**_BASE, **options})
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)


@functools.cache
def directory_of(family: str) -> Path:
    """The directory of a family's tiny model, made once per test process and removed at its end."""
    holder = tempfile.TemporaryDirectory(prefix="headrace-tiny-")
    atexit.register(holder.cleanup)
    config_class, options = (FAMILIES | UNSUPPORTED)[family]
    make_model(Path(holder.name), config_class, options)
    return Path(holder.name)


@functools.cache
def source_of(family: str, dtype: str = "float32") -> torch_backend.TorchEngine:
    return torch_backend.open({"model": str(directory_of(family)), "dtype": dtype})


@functools.cache
def decoder_of(family: str, dtype: str = "float32") -> cpu_backend.CpuDecoder:
    """A decoder with three lanes, whose entries a test frees before it ends."""
    config = {"model": str(directory_of(family)), "dtype": dtype, "lanes": 3, "context": CONTEXT}
    return cpu_backend.open(config)


@functools.cache
def module_of(family: str, dtype: str = "float32") -> Any:
    """The bare transformers model that results are compared with."""
    return load_model(directory_of(family), dtype=dtype).module


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """A random prompt."""
    rng = np.random.default_rng(seed + 1000 * num_tokens)
    return [int(token) for token in rng.integers(3, VOCAB, num_tokens)]


def options(
    route: Route,
    num_tokens: int,
    *,
    group_layers: int = 1,
    chunk: int = 0,
    prefill_chunk: int = 0,
    emission: Emission = "layers",
    start: int = 0,
    cuts: tuple[int, ...] = (),
) -> Prefill:
    """What a source is asked to do, with everything optional left out."""
    return Prefill(
        AttemptId(0, 0, 1),
        0,
        0,
        num_tokens,
        route,
        group_layers,
        chunk,
        prefill_chunk,
        emission,
        digest=False,
        start=start,
        cuts=cuts,
    )


@dataclass
class FakeSink:
    """A sink over plain memory which insists on what a real one would insist on."""

    plan: Plan
    options: Prefill
    buffer: memoryview
    cancel_at_write: int | None = None
    spans: list[tuple[Span, ...]] = field(default_factory=list)
    logits: bytes | None = None

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.plan.windows, self.plan.num_tokens)
        self.num_writes = 0

    def check(self) -> None:
        pass

    def write(self, *spans: Span) -> FakeWriter:
        if self.num_writes == self.cancel_at_write:
            raise Cancelled("cancelled by the test")
        self.num_writes += 1
        assert spans
        assert all(self.plan.span_nbytes(span) for span in spans), "a span without cells"
        return FakeWriter(self, spans)

    def final(
        self,
        logits: memoryview | bytes | None,
        *,
        token: int | None = None,
        ready_ns: int | None = None,
    ) -> None:
        assert self.logits is None
        assert logits is not None
        assert token is None
        assert ready_ns is not None
        assert self.coverage.first_missing() is None
        self.logits = bytes(logits)
        offset = self.plan.slot.logits_offset
        self.buffer[offset : offset + len(self.logits)] = self.logits

    def cells(self) -> dict[tuple[int, int], bytes]:
        """The bytes of every (layer, part) in the transfer set, in the slot's order."""
        return {
            (copy.layer, copy.part): b"".join(
                bytes(row) for row in Cells(self.buffer, copy.source, *copy[:4]).rows()
            )
            for copy in self.plan.copies(self.plan.whole())
        }


class FakeWriter:
    def __init__(self, sink: FakeSink, spans: tuple[Span, ...]) -> None:
        self._sink = sink
        self._spans = spans
        self._filled: set[int] = set()
        self._committed = False

    def cells(self, layer: int) -> list[Cells]:
        if self._committed:
            raise LocalProtocolError("cells of a writer that was committed")
        self._filled.add(layer)
        return [
            Cells(self._sink.buffer, copy.source, copy.layer, copy.part, copy.start, copy.stop)
            for span in self._spans
            if span.layer_start <= layer < span.layer_stop
            for copy in self._sink.plan.copies(Span(layer, layer + 1, span.start, span.stop))
        ]

    def commit(self) -> None:
        if self._committed:
            raise LocalProtocolError("committed twice")
        self._committed = True
        held = {copy.layer for span in self._spans for copy in self._sink.plan.copies(span)}
        assert held <= self._filled, f"layers {held - self._filled} were never filled"
        self._sink.coverage.add(self._spans)
        self._sink.spans.append(self._spans)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and not self._committed:
            self.commit()


def make_sink(
    source: Manifest, decoder: Manifest, asked: Prefill, *, context: int = CONTEXT
) -> FakeSink:
    """A sink over fresh memory that is full of NaN, so that a cell never written shows."""
    layout = agree(source, decoder)
    plan = compile_plan(decoder, layout, asked.num_tokens, context, asked.start)
    return FakeSink(plan, asked, memoryview(bytearray(b"\xff" * plan.slot.nbytes)))


def slot_view(buffer: memoryview, layout: Layout) -> SlotView:
    """The owner's view of a slot."""
    return SlotView(buffer, np.frombuffer(buffer, np.uint8).ctypes.data, layout)


def hand_off(
    source: PrefillEngine, decoder: Decoder, prompt: Sequence[int], asked: Prefill
) -> tuple[FakeSink, Entry]:
    """Prefill, import span by span in the order of emission, publish."""
    sink = make_sink(source.manifest(), decoder.manifest(), asked)
    source.prefill_stream(prompt, sink)
    reservation = decoder.reserve(len(prompt))
    slot = slot_view(sink.buffer, sink.plan.layout)
    for span in (span for spans in sink.spans for span in spans):
        fence = decoder.begin_import(reservation, slot, sink.plan.copies(span))
        assert fence.done()
    return sink, decoder.publish(reservation)


def greedy(row: memoryview | bytes) -> int:
    return int(np.frombuffer(row, np.float32).argmax())


def reference(
    module: Any, prompt: Sequence[int], steps: int, prefill_chunk: int = 0
) -> tuple[list[int], list[bytes]]:
    """Tokens and logits rows of plain transformers in one process, with its own cache.

    The forward calls are those of a hand-off: only the last logits row is computed, and a prefill
    chunk is a forward of its own. With other calls (all rows at once, a batch of two) transformers
    itself gives other last bits.
    """
    cache = transformers.DynamicCache(config=module.config)
    tokens: list[int] = []
    rows: list[bytes] = []
    ids = list(prompt)
    chunk = prefill_chunk or len(ids)
    pieces = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
    for at in range(len(pieces) + steps):
        piece = pieces[at] if at < len(pieces) else [tokens[-1]]
        with torch.no_grad():
            output = module(
                input_ids=torch.tensor([piece]), cache=cache, use_cache=True, logits_to_keep=1
            )
        if at >= len(pieces) - 1:
            rows.append(output.logits[0, -1].float().numpy().tobytes())
            tokens.append(greedy(rows[-1]))
    return tokens, rows
