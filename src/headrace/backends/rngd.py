"""The RNGD prefill engine: FuriosaAI's per-layer kernels, on a card or emulated on the CPU.

It runs in the vendor's own environment (`headrace rngd setup`), which has no transformers. The same
code drives a card and, with `emulate`, the vendor's executor on the CPU. A layer's K and V are read
into the slot as soon as the kernel that makes them was called, before the layer's attention.
"""

from __future__ import annotations

import sys
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
from headrace.engine.rngd import cards, geometry, preflight
from headrace.engine.rngd.buckets import TOKEN_BUCKETS
from headrace.engine.rngd.card import CardExecutor
from headrace.engine.rngd.compiled import CompiledKernels
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.executor import Executor
from headrace.engine.rngd.furiosa import import_smi, sdk_named
from headrace.engine.rngd.model import Model, read_model
from headrace.engine.rngd.probes import PES_PER_CARD
from headrace.engine.rngd.program import LayerProgram
from headrace.engine.rngd.record import Reads, verified_reads
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.weights import Weights
from headrace.engine.tensors import as_bytes
from headrace.errors import (
    BackendUnavailable,
    Closed,
    HeadraceError,
    LocalProtocolError,
    Refused,
    Unquiet,
)
from headrace.geometry import Manifest


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory with config.json and safetensors. threads: of torch on the host. emulate: run
    the vendor's kernels on the CPU. device: the number of the card, in devices of as many chips as
    the model's kernels span. share_device: go on although another process uses it. unverified: go
    on without a record of a probe, or against it. max_positions: the longest prompt, by default
    the model's longest or 8192. token_buckets: most tokens computed at once, one number for each
    set of kernels. compile_cache: where compiled kernels are kept. sdk: `module:factory` of a fake
    that stands in for the vendor's packages, for tests.
    """

    model: str
    dtype: str = geometry.KV_DTYPE
    threads: Annotated[int, Meta(ge=1)] = 1
    emulate: bool = False
    device: Annotated[int, Meta(ge=0)] = 0
    share_device: bool = False
    unverified: bool = False
    max_positions: Annotated[int, Meta(ge=1)] | None = None
    token_buckets: tuple[int, ...] = TOKEN_BUCKETS
    compile_cache: str | None = None
    sdk: str | None = None


def open(config: Mapping[str, Any]) -> RngdEngine:
    """Load the engine from the fields of `Options`.

    On a card every kernel is loaded before this returns; what was not compiled before takes minutes
    each (see `headrace rngd compile`).

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
    model = read_model(
        Path(options.model),
        max_positions=options.max_positions,
        token_buckets=options.token_buckets,
    )
    if not options.emulate and not options.unverified:
        model.check_for_card()
    if options.sdk is None:
        _check_installed(options, model)
    torch.set_num_threads(options.threads)
    sdk = sdk_named(options.sdk)
    executor = EmulatedExecutor(sdk) if options.emulate else _card(options, model, sdk)
    try:
        return RngdEngine(model, sdk, executor, options.threads)
    except BaseException:
        executor.close()
        raise


def occupants(config: Mapping[str, Any]) -> list[str]:
    """One sentence for each other user of the card that these options name.

    Raises:
        Refused: an option is unknown or wrong, or no kernels compute this model.
        BackendUnavailable: there is no such card here.
    """
    options = read_options(config, Options, "rngd")
    if options.emulate:
        return []
    chips = geometry.family_of(geometry.read_config(Path(options.model))).chips
    try:
        smi = import_smi() if options.sdk is None else sdk_named(options.sdk).smi
    except ImportError:
        return []  # opening it will say what is missing
    return [
        f"core {core} of card {card} is occupied"
        for card in range(options.device * chips, (options.device + 1) * chips)
        for core in cards.busy_cores(smi, card)
    ]


def _check_installed(options: Options, model: Model) -> None:
    """Preflight, in a child; what must be compiled says itself if it cannot be."""
    preflight.check(
        sys.executable,
        emulate=options.emulate,
        device=options.device,
        compile=False,
        share=options.share_device,
        fusion=PES_PER_CARD * model.family.chips,
        families=(model.family.module,),
    )


def _card(options: Options, model: Model, sdk: Sdk) -> CardExecutor:
    chips = model.family.chips
    kept = Path(options.compile_cache) if options.compile_cache is not None else None
    return CardExecutor(
        sdk,
        options.device,
        chips=chips,
        reads=_reads(options, sdk, chips),
        cache=CompiledKernels(sdk, _say, kept),
        told=_say,
    )


def _reads(options: Options, sdk: Sdk, chips: int) -> Reads:
    """How rows are read from this card: as its record says, or the way that needs no views."""
    try:
        return verified_reads(sdk, cards.describe(sdk.smi, options.device * chips), chips)
    except BackendUnavailable as exc:
        if not options.unverified or exc.stage != "layout_unverified":
            raise
        _say(f"going on unverified, as asked: {exc.detail}")
        return "whole"


def _say(text: str) -> None:
    """For whoever waits for a source to start."""
    print(f"headrace rngd: {text}", file=sys.stderr, flush=True)


class RngdEngine:
    """Prefills one prompt at a time; implements `PrefillEngine`."""

    def __init__(self, model: Model, sdk: Sdk, executor: Executor, threads: int) -> None:
        """The executor is this engine's from now on. Loads weights and, on a card, all kernels.

        Raises:
            Refused: the checkpoint's weights are not what its config says.
            BackendUnavailable: a kernel is not as expected, or cannot be compiled.
        """
        self._executor = executor
        self._manifest = Manifest(
            role="source",
            model=fingerprint(model.directory),
            layers=geometry.layers(model.family, model.config, model.max_positions),
            layouts=("token_major",),
            vocab_size=int(model.family.text(model.config)["vocab_size"]),
            logits_dtype="float32",
            max_positions=model.max_positions,
            prefix="recompute",
        )
        weights = Weights(model.directory, model.stand_ins)
        program = LayerProgram(sdk, executor, model.family, model.config, weights, model.buckets)
        shapes = model.buckets.shapes()
        program.prepare(shapes[:1] if executor.emulated else shapes)
        self._program: LayerProgram | None = program
        self.facts = {
            "sdk": sdk.name,
            "emulated": executor.emulated,
            **{name: str(version) for name, version in sdk.versions.items()},
            "threads": threads,
            "dtype": geometry.KV_DTYPE,
            "kernels": f"{model.family.module} {model.family.variant}",
            "token_buckets": ",".join(str(size) for size in model.buckets.tokens),
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
            Unquiet: the card failed or fell silent, so that it is not known to write no more.
        """
        program = self._program
        if program is None:
            raise Closed("the rngd engine was closed")
        check_asked(tokens, sink, start)
        self._check_tokens(tokens)
        try:
            self._run(program, tokens, sink, start)
        except Unquiet:
            raise
        except BaseException as exc:
            try:
                self._executor.wait()
            except HeadraceError as broken:
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
            self._executor.close()
            self._program = None

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
        emitter.wait_for(ticket)
        emitter.poll()
        logits = program.logits(row)
        ready_ns = time.monotonic_ns()
        emitter.finish()
        self._executor.wait()  # for nothing, but it lets go of what copies referred to
        sink.final(as_bytes(logits), ready_ns=ready_ns)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self._manifest.vocab_size:
            raise LocalProtocolError(
                f"token ids in [{low}, {high}], the vocabulary is [0, {self._manifest.vocab_size})"
            )
