"""The torch prefill engine: a transformers model that writes its cache into a slot as it computes.

What becomes of the cache on each route is told in `headrace.backends.takers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.backends.asked import check_asked
from headrace.backends.base import PrefillSink
from headrace.backends.options import read_options
from headrace.backends.takers import taker_of
from headrace.engine.layers import manifest
from headrace.engine.loading import LoadedModel, load_model
from headrace.engine.own_cache import OwnCache
from headrace.engine.prefill import Seed, run_prefill
from headrace.engine.tensors import as_bytes
from headrace.errors import Closed, Refused
from headrace.geometry import Manifest, PrefixUse


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. attn: the attention implementation, by
    default the model's best. max_positions: the longest prompt, by default the model's longest.
    own_cache_nbytes: most bytes of finished prompts' states that are kept to go on from, 0 = none.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    attn: str | None = None
    device: str = "cpu"
    max_positions: Annotated[int, Meta(ge=1)] | None = None
    own_cache_nbytes: Annotated[int, Meta(ge=0)] = 0


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
    max_positions = options.max_positions or model.max_positions
    return TorchEngine(model, max_positions, own_cache_nbytes=options.own_cache_nbytes)


class TorchEngine:
    """Prefills one prompt at a time on one device.

    own_cache_nbytes: see `Options`. With it, a prompt that goes on where a finished one ended is
    computed from there; else all of it is, and what `start` saves is the moving of the first cells.
    The bits are the same.
    """

    prefix: PrefixUse = "recompute"
    """What its manifest says where it has no own cache."""

    def __init__(
        self, model: LoadedModel, max_positions: int, *, own_cache_nbytes: int = 0
    ) -> None:
        if max_positions > model.max_positions:
            raise Refused(
                f"max_positions is {max_positions}, the model was made for {model.max_positions}",
                field="max_positions",
            )
        self._model: LoadedModel | None = model
        facts = manifest(model.config, model.directory, "source", model.dtype, max_positions)
        self._manifest = replace(facts, prefix="own_cache" if own_cache_nbytes else self.prefix)
        self._own_cache = OwnCache(self._manifest.layers, own_cache_nbytes)
        self._keeps = own_cache_nbytes > 0
        self.facts = model.pairing_facts("DynamicCache")

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """Compute the prompt and put positions [start, n) of its cache and the logits into `sink`.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the tokens or `start` do not fit the plan or the model.
        """
        if self._model is None:
            raise Closed("the torch engine was closed")
        check_asked(tokens, sink, start)
        self._model.check_tokens(tokens)
        self._run(self._model, tokens, sink, start, self._seed(tokens, sink, start))

    def statistics(self) -> Mapping[str, int]:
        """What its own cache holds, and how often that was of use."""
        return self._own_cache.statistics()

    def close(self) -> None:
        self._model = None
        self._own_cache.clear()

    def _seed(self, tokens: Sequence[int], sink: PrefillSink, start: int) -> Seed | None:
        """What the computation can go on from at `start`; None to begin at 0."""
        if not start or not self._keeps:
            return None
        options = sink.options
        return self._own_cache.find(tokens, start, options.cuts, options.prefill_chunk)

    def _run(
        self,
        model: LoadedModel,
        tokens: Sequence[int],
        sink: PrefillSink,
        start: int,
        seed: Seed | None,
    ) -> None:
        route, options, layers = taker_of(sink, start), sink.options, self._manifest.layers
        computed: list[Seed] = []
        logits, ready_ns = run_prefill(
            model,
            layers,
            tokens,
            options.prefill_chunk,
            route,
            cuts=options.cuts,
            seed=seed,
            keep=computed.append if self._keeps else None,
        )
        route.finish()
        sink.final(as_bytes(logits), ready_ns=ready_ns)
        for states in computed:  # only now: an attempt that was withdrawn leaves nothing
            self._own_cache.put(tokens, options.cuts, options.prefill_chunk, states)
