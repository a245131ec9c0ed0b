"""The torch prefill engine: a transformers model that writes its cache into a slot as it computes.

What becomes of the cache on each route is told in `headrace.backends.takers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.backends.base import PrefillSink
from headrace.backends.options import read_options
from headrace.backends.takers import taker_of
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.prefill import run_prefill
from headrace.engine.tensors import as_bytes
from headrace.errors import Closed, LocalProtocolError, Refused
from headrace.geometry import Manifest


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
        facts = manifest(model.config, model.directory, "source", model.dtype, max_positions)
        self._manifest = replace(facts, prefix="recompute")
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
        check_asked(tokens, sink, start)
        route = taker_of(sink, start)
        logits, ready_ns = run_prefill(
            self._model,
            self._manifest.layers,
            tokens,
            sink.options.prefill_chunk,
            route,
            cuts=sink.options.cuts,
        )
        route.finish()
        sink.final(as_bytes(logits), ready_ns=ready_ns)

    def close(self) -> None:
        self._model = None


def check_asked(tokens: Sequence[int], sink: PrefillSink, start: int) -> None:
    """Check that tokens, start, plan and grant are of one attempt.

    Raises:
        LocalProtocolError: they are not, or `start` is not the last place where the computation is
            cut, so that the decoder's cells before it would be others than a cold run's.
    """
    plan, cuts = sink.plan, sink.options.cuts
    if len(tokens) != plan.num_tokens or not 0 <= start < plan.num_tokens:
        raise LocalProtocolError(
            f"{len(tokens)} tokens from position {start}, the plan has {plan.num_tokens}"
        )
    if plan.start != start:
        raise LocalProtocolError(f"asked from position {start}, the plan begins at {plan.start}")
    if start and (not cuts or cuts[-1] != start):
        raise LocalProtocolError(
            f"asked from position {start}, which is not the last of the cuts {list(cuts)}"
        )
