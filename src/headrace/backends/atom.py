"""The ATOM decoder: one lane of a card, which a compiled model decodes in.

It runs in the vendor's own environment, in the owner's process, on one thread. Imports and decode
steps are synchronous calls of one runtime, so they take turns: while an entry is published nothing
is imported, and the next request waits in its slot (see `headrace.protocol.admission`). What
overlaps is the prefill of another device, in another process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from headrace.backends.base import (
    Caps,
    Done,
    Entry,
    Fence,
    Reservation,
    ReserveFailed,
    SlotView,
)
from headrace.backends.options import read_options
from headrace.engine.atom import preflight
from headrace.engine.atom.caches import layers_of
from headrace.engine.atom.casts import Cast
from headrace.engine.atom.compiled import CompiledDecoder
from headrace.engine.atom.lane import AtomLane, same_for_all
from headrace.engine.atom.rebellions import sdk_named
from headrace.engine.atom.record import Verified, verified
from headrace.engine.atom.sdk import Sdk
from headrace.engine.checkpoint import fingerprint
from headrace.engine.tensors import as_bytes, check_region, over_address
from headrace.errors import Closed, DeviceError, LocalProtocolError, Refused, WouldBlock
from headrace.geometry import Layout, Manifest, Part
from headrace.plan import Copy

LANE = 0


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: the directory of the checkpoint, with config.json and safetensors. compiled: the
    directory that optimum-rbln compiled it into. dtype: what the source sends. threads: of torch on
    the host. context: positions of the lane, by default and at most what was compiled. device: the
    number of the card. share_device: go on although another process uses it. lossy: go on although
    the card keeps the cache in a format that not every value of `dtype` is one of; changed values
    are then counted. read_back: fetch each block that was written and compare. sdk:
    `module:factory` of a fake that stands in for the vendor's packages, for tests.
    """

    model: str
    compiled: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    context: Annotated[int, Meta(ge=1)] | None = None
    device: Annotated[int, Meta(ge=0)] = 0
    share_device: bool = False
    lossy: bool = False
    read_back: bool = False
    sdk: str | None = None


def open(config: Mapping[str, Any]) -> AtomDecoder:
    """Load the decoder from the fields of `Options` onto a card.

    Raises:
        Refused: an option is unknown or wrong, the model is not compiled as it has to be, or a cast
            is lossy and was not allowed.
        BackendUnavailable: the vendor's packages or a card are not usable here, or no record of a
            probe says that they can be; it says why and what to do.
    """
    options = read_options(config, Options, "atom")
    if options.sdk is None:
        preflight.check(sys.executable, device=options.device, share=options.share_device)
    sdk = sdk_named(options.sdk)
    found = verified(sdk, options.device, Path(options.compiled))
    _check_checkpoint(found, options)
    return decoder_on(sdk, found, options)


def decoder_on(sdk: Sdk, found: Verified, options: Options) -> AtomDecoder:
    """The decoder over packages of which `found` holds; raises as `open` does."""
    torch.set_num_threads(options.threads)
    compiled = CompiledDecoder(sdk, options.compiled, options.device)
    return AtomDecoder(
        compiled,
        AtomLane(sdk, compiled, found, options.dtype, reads_back=options.read_back),
        _manifest(compiled, options),
        lossy=options.lossy,
        facts={
            "sdk": sdk.name,
            **{name: str(version) for name, version in sdk.versions.items()},
            "driver": sdk.driver,
            **_facts(compiled, found),
            "threads": options.threads,
        },
    )


class AtomDecoder:
    """One lane of one card; implements `Decoder`."""

    def __init__(
        self,
        compiled: CompiledDecoder,
        lane: AtomLane,
        manifest: Manifest,
        *,
        lossy: bool,
        facts: Mapping[str, Any],
    ) -> None:
        """Raises: Refused: a cast is lossy, and `lossy` is not set."""
        _check_casts(lane.casts, lossy=lossy)
        exact = all(cast.exact for cast in lane.casts)
        self.caps = Caps(max_lanes=1, reads_back=exact, work=tuple(lane.counts))
        self.facts = {**facts, "cast": same_for_all(lane.casts)}
        self._compiled: CompiledDecoder | None = compiled
        self._lane = lane
        self._manifest = manifest
        self._held: Reservation | Entry | None = None
        self._serial = 0
        self._decoded = 0

    def manifest(self) -> Manifest:
        return self._manifest

    def reserve(self, num_tokens: int) -> Reservation:
        """Set the lane aside for a prompt.

        Raises:
            WouldBlock: it is taken.
            LocalProtocolError: the prompt can never fit.
            ReserveFailed: it has to be cleared, and that failed; it is taken until it is freed.
        """
        self._open()
        longest = self._manifest.max_positions
        if not 1 <= num_tokens <= longest:
            raise LocalProtocolError(f"{num_tokens} tokens, the lane holds 1 to {longest}")
        if self._held is not None:
            raise WouldBlock("the one lane is taken")
        self._serial += 1
        self._held = reservation = Reservation(LANE, num_tokens, self._serial)
        try:
            self._lane.begin(num_tokens)
        except DeviceError as exc:
            raise ReserveFailed(f"the lane was not cleared: {exc}", reservation) from exc
        return reservation

    def forget_imports(self, reservation: Reservation) -> None:
        """An attempt begins: what came before it counts no more.

        Raises:
            LocalProtocolError: the reservation is stale.
        """
        self._check(reservation, Reservation)
        self._lane.forget()

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        """Take cells in from the slot; blocks that they complete are on the card on return.

        Raises:
            LocalProtocolError: the reservation is stale, or a copy lies outside it or the slot;
                then nothing was touched.
            DeviceError: the card failed.
        """
        self._check(reservation, Reservation)
        for copy in copies:
            self._check_copy(copy, slot, reservation.num_tokens)
        for copy in copies:
            part = self._part(copy)
            cells = over_address(
                slot.address, copy.source, part, copy.stop - copy.start, slot.layout
            )
            self._lane.write(copy.layer, copy.part, copy.start, cells)
        return Done()

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> memoryview:
        """The prompt's bytes of a copy's cells, as the card has them.

        Raises:
            LocalProtocolError: `held` is stale, or the lane never held these positions, or does not
                any more.
            DeviceError: the card failed.
        """
        self._check(held, type(held))
        self._part(copy)
        if self._decoded and self._lane.slid(copy.layer, held.num_tokens + self._decoded):
            raise LocalProtocolError(
                f"positions [{copy.start}, {copy.stop}) of layer {copy.layer}: its window moved on"
            )
        cells = self._lane.read(copy.layer, copy.part, copy.start, copy.stop)
        return as_bytes(cells if layout == "head_major" else cells.permute(1, 0, 2))

    def publish(self, reservation: Reservation) -> Entry:
        """Make the reservation visible to decode; no byte moves.

        Raises:
            LocalProtocolError: it is stale, or a row of its prompt is not on the card.
        """
        self._check(reservation, Reservation)
        self._lane.check_flushed()
        entry = Entry(LANE, reservation.num_tokens, reservation.serial)
        self._held, self._decoded = entry, 0
        return entry

    def free(self, held: Reservation | Entry) -> None:
        """Give the lane back."""
        self._check(held, type(held))
        self._lane.end()
        self._held, self._decoded = None, 0

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        """Feed the entry its next token; returns its float32 row of logits.

        Raises:
            LocalProtocolError: it is stale or not published, given twice or full, or the token is
                unknown.
            DeviceError: the card failed.
        """
        compiled = self._open()
        if len(active) > 1:
            raise LocalProtocolError(f"{len(active)} entries in a step of one lane")
        rows = []
        for entry, token in active:
            self._check(entry, Entry)
            position = entry.num_tokens + self._decoded
            if position >= self._manifest.max_positions:
                raise LocalProtocolError(
                    f"the lane is full: {position} of {self._manifest.max_positions} positions"
                )
            if not 0 <= token < self._manifest.vocab_size:
                raise LocalProtocolError(
                    f"token {token}, the vocabulary is [0, {self._manifest.vocab_size})"
                )
            row = compiled.decode(token, position)[: self._manifest.vocab_size]
            self._decoded += 1
            rows.append(as_bytes(row))
        return rows

    def statistics(self) -> Mapping[str, int]:
        """The lane by state, and what was transferred."""
        return {
            "lanes_free": int(self._held is None),
            "lanes_reserved": int(isinstance(self._held, Reservation)),
            "lanes_published": int(isinstance(self._held, Entry)),
            **self._lane.counts,
        }

    def close(self) -> None:
        """Let go of the card. Idempotent."""
        self._compiled = None
        self._held = None
        self._lane.close()

    def _open(self) -> CompiledDecoder:
        if self._compiled is None:
            raise Closed("the atom decoder was closed")
        self._compiled.check_thread("a call")
        return self._compiled

    def _check(self, held: Reservation | Entry, kind: type) -> None:
        self._open()
        if type(self._held) is not kind or self._held != held:
            raise LocalProtocolError(f"{held} is not what the lane holds: {self._held}")

    def _check_copy(self, copy: Copy, slot: SlotView, num_tokens: int) -> None:
        part = self._part(copy)
        positions = copy.stop - copy.start
        check_region(copy.source, part, positions, slot.layout, slot.buffer.nbytes)
        self._lane.check_rows(copy.layer, copy.part, copy.start, copy.stop)

    def _part(self, copy: Copy) -> Part:
        layers = self._manifest.layers
        if not 0 <= copy.layer < len(layers):
            raise LocalProtocolError(f"layer {copy.layer}, the model has {len(layers)}")
        layer = layers[copy.layer]
        if not 0 <= copy.part < len(layer.parts):
            raise LocalProtocolError(f"part {copy.part} of {layer.name}")
        return layer.parts[copy.part]


def _check_casts(casts: Sequence[Cast], *, lossy: bool) -> None:
    bad = sorted({cast.name for cast in casts if not cast.exact})
    if bad and not lossy:
        raise Refused(
            f"{'; '.join(bad)}: a value may change as it is imported. Give --decoder-options "
            "'{\"lossy\": true}' to go on and have such values counted, or compile the model for "
            "another dtype",
            field="lossy",
        )


def _check_checkpoint(found: Verified, options: Options) -> None:
    """The compiled model tells no fingerprint; its probe compared it with one that does."""
    if found.checkpoint != fingerprint(Path(options.model)):
        raise Refused(
            f"{options.compiled} was probed with another checkpoint than {options.model}; name the "
            "one that it was compiled from",
            field="model",
        )


def _manifest(compiled: CompiledDecoder, options: Options) -> Manifest:
    context = options.context or compiled.positions
    if context > compiled.positions:
        raise Refused(
            f"context is {context}, and the model was compiled for {compiled.positions} positions; "
            "ask for less, or compile it again",
            field="context",
        )
    return Manifest(
        role="decoder",
        model=fingerprint(Path(options.model)),
        layers=layers_of(compiled.caches, options.dtype),
        layouts=("head_major", "token_major"),
        vocab_size=_vocab_size(Path(options.model)),
        logits_dtype="float32",
        max_positions=context,
    )


def _vocab_size(directory: Path) -> int:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
        text = config.get("text_config") or config
        return int(text["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Refused(f"{path} cannot be used: {exc}", field="model") from exc


def _facts(compiled: CompiledDecoder, found: Verified) -> dict[str, Any]:
    full = next((each for each in compiled.caches if each.kind == "full"), None)
    return {
        "attention": str(compiled.config.attn_impl),
        "block": 0 if full is None else full.rows,
        "number_format": found.number_format,
        "sub_blocks": found.sub_blocks,
        "clears": found.clears,
    }
