"""The RNGD prefill engine: FuriosaAI's per-layer kernels, on a card or emulated on the CPU.

It runs in the vendor's own environment (`headrace rngd setup`), which has no transformers. The same
code drives a card and, with `emulate`, the vendor's executor on the CPU. A layer's K and V are read
into the slot as soon as the kernel that makes them was called, before the layer's attention.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from headrace.backends.asked import check_asked
from headrace.backends.base import PrefillSink
from headrace.backends.options import read_options
from headrace.backends.rngd_emitter import Emitter
from headrace.engine.checkpoint import fingerprint
from headrace.engine.pieces import pieces
from headrace.engine.rngd import geometry
from headrace.engine.rngd.buckets import TOKEN_BUCKETS, choose
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.executor import Executor
from headrace.engine.rngd.furiosa import open_sdk
from headrace.engine.rngd.program import LayerProgram
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.weights import Weights
from headrace.engine.tensors import as_bytes
from headrace.errors import Closed, DeviceError, LocalProtocolError, Refused, Unquiet
from headrace.geometry import Manifest

MAX_POSITIONS = 8192
"""The longest prompt by default: caches of all layers are made for it at the start."""


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. emulate: run the vendor's kernels on the
    CPU. device: the number of the card. threads: of torch on the host. max_positions: the longest
    prompt, by default the model's longest or MAX_POSITIONS. token_buckets: most tokens computed at
    once, one number for each compiled shape. sdk: `module:factory` of a fake that stands in for the
    vendor's packages, for tests.
    """

    model: str
    dtype: str = geometry.KV_DTYPE
    threads: Annotated[int, Meta(ge=1)] = 1
    emulate: bool = False
    device: Annotated[int, Meta(ge=0)] = 0
    max_positions: Annotated[int, Meta(ge=1)] | None = None
    token_buckets: tuple[int, ...] = TOKEN_BUCKETS
    sdk: str | None = None


def open(config: Mapping[str, Any]) -> RngdEngine:
    """Load the engine from the fields of `Options`.

    Raises:
        Refused: an option is unknown or wrong, or no kernels compute this model.
        BackendUnavailable: the vendor's packages or a card are not usable here; it says why.
    """
    options = read_options(config, Options, "rngd")
    if options.dtype != geometry.KV_DTYPE:
        raise Refused(
            f"dtype is {options.dtype!r}, and RNGD's kernels keep their cache in "
            f"{geometry.KV_DTYPE}; give --dtype {geometry.KV_DTYPE}",
            field="dtype",
        )
    torch.set_num_threads(options.threads)
    sdk = _sdk(options)
    return RngdEngine(options, sdk, EmulatedExecutor(sdk))


def _sdk(options: Options) -> Sdk:
    if options.sdk is None:
        return open_sdk()
    module, _, factory = options.sdk.partition(":")
    made: Sdk = getattr(importlib.import_module(module), factory)()
    return made


class RngdEngine:
    """Prefills one prompt at a time; implements `PrefillEngine`."""

    def __init__(self, options: Options, sdk: Sdk, executor: Executor) -> None:
        """The executor is this engine's from now on.

        Raises:
            Refused: no kernels compute this model, or it was made for fewer positions.
        """
        directory = Path(options.model)
        config = geometry.read_config(directory)
        family = geometry.family_of(config)
        longest = geometry.longest(family, config)
        max_positions = options.max_positions or min(longest, MAX_POSITIONS)
        if max_positions > longest:
            raise Refused(
                f"max_positions is {max_positions}, the model was made for {longest}",
                field="max_positions",
            )
        shapes = family.geometry(family.text(config)).values()
        windows = [shape.window for shape in shapes if shape.window is not None]
        buckets = choose(
            options.token_buckets, max_positions, min(windows, default=None), family.min_tokens
        )
        self._executor = executor
        self._manifest = Manifest(
            role="source",
            model=fingerprint(directory),
            layers=geometry.layers(family, config, max_positions),
            layouts=("token_major",),
            vocab_size=int(family.text(config)["vocab_size"]),
            logits_dtype="float32",
            max_positions=max_positions,
            prefix="recompute",
        )
        weights = Weights(directory, family.optional)
        self._program: LayerProgram | None = LayerProgram(
            sdk, executor, family, config, weights, buckets
        )
        self.facts = {
            "sdk": sdk.name,
            "emulated": executor.emulated,
            **{name: str(version) for name, version in sdk.versions.items()},
            "threads": options.threads,
            "dtype": options.dtype,
            "token_buckets": ",".join(str(size) for size in buckets.tokens),
        }

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """Compute the prompt and put positions [start, n) of its cache and the logits into `sink`.

        All of the prompt is computed: what `start` saves is the moving of the first cells. When
        this returns or raises, nothing is written into the slot any more.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the tokens or `start` do not fit the plan or the model.
            Unquiet: the card failed, so that it is not known to write no more.
        """
        program = self._program
        if program is None:
            raise Closed("the rngd engine was closed")
        check_asked(tokens, sink, start)
        self._check_tokens(tokens)
        try:
            self._run(program, tokens, sink, start)
        except BaseException as exc:
            try:
                self._executor.wait()
            except DeviceError as broken:
                raise Unquiet(f"copies into the slot may be in flight: {broken}") from exc
            raise

    def statistics(self) -> Mapping[str, int]:
        """Of the executor, and the host's time in each stage, in ns."""
        stages = self._program.stage_ns if self._program is not None else {}
        return {
            **self._executor.statistics(),
            **{f"{stage}_ns": took for stage, took in stages.items()},
        }

    def close(self) -> None:
        if self._program is not None:
            self._program = None
            self._executor.close()

    def _run(
        self, program: LayerProgram, tokens: Sequence[int], sink: PrefillSink, start: int
    ) -> None:
        emitter = Emitter(sink, start, program.read)
        given = program.run(
            tokens,
            pieces(len(tokens), sink.options.prefill_chunk, sink.options.cuts),
            begin=emitter.begin,
            final=emitter.final,
            end=emitter.end,
        )
        row = torch.empty(1, program.last_width, dtype=torch.bfloat16)
        ticket = program.read_last(given, row)
        while not ticket.done():
            sink.check()
            emitter.poll()
        ready_ns = time.monotonic_ns()
        emitter.finish()
        sink.final(as_bytes(program.logits(row)), ready_ns=ready_ns)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._manifest.vocab_size:
            raise LocalProtocolError(
                f"token ids in [{low}, {high}], the vocabulary is [0, {self._manifest.vocab_size})"
            )
