"""What is checked: a source and a decoder, and what is known of them.

The decoder is opened once and lent to one owner after another, since a device's model may take
minutes to load. Each source is a process of its own, behind the engine that misbehaves on command.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace as struct_replace

from headrace.backends.base import Caps, Decoder, Entry, Fence, Reservation, SlotView
from headrace.backends.load import open_decoder, size_options
from headrace.backends.null import decoder_like
from headrace.errors import DeviceError, HeadraceError
from headrace.geometry import Layout, Manifest, Sliding
from headrace.plan import Copy
from headrace.runtime.worker import SourceHandle
from headrace.testing import faulty
from headrace.testing.pair import imitation
from headrace.testing.pair.occupants import device_use

START_TIMEOUT_S = 600.0
FENCE_WITHIN_S = 30.0


class PairGone(HeadraceError):
    """The source or the decoder cannot be had again: what comes after would only repeat that."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is checked, and how thoroughly.

    source, decoder: names as `headrace run` takes them. context: positions of a lane and of a slot.
    lanes: most that are asked of a decoder that has several. num_decoded: tokens that each request
    decodes, where the decoder does. within_s: how long anything may take that has no bound of its
    own.
    """

    source: str
    decoder: str
    source_options: Mapping[str, Any] = field(default_factory=dict)
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    source_python: str | None = None
    context: int = 128
    lanes: int = 3
    quick: bool = False
    seed: int = 0
    num_decoded: int = 4
    within_s: float = 120.0
    share_device: bool = False


class Result(NamedTuple):
    """What two hand-offs of one prompt must have in common; digests stand for bytes."""

    tokens: tuple[int, ...]
    logits: str
    kv: tuple[str, ...]

    def difference(self, other: Result) -> str:
        """What differs, in words; empty if nothing does."""
        words = []
        if self.tokens != other.tokens:
            words.append(f"tokens {list(other.tokens)} instead of {list(self.tokens)}")
        if self.logits != other.logits:
            words.append("other logits")
        if len(self.kv) != len(other.kv):
            words.append(f"{len(other.kv)} layers instead of {len(self.kv)}")
        else:
            layers = [at for at, (a, b) in enumerate(zip(self.kv, other.kv, strict=True)) if a != b]
            if layers:
                words.append(f"other KV bytes in layers {layers}")
        return ", ".join(words)


class StartedSource(NamedTuple):
    """A source process that was started, and the directory in which it looks for orders."""

    handle: SourceHandle
    control: Path


class Lent:
    """A decoder as one of several owners in turn has it: closing gives it back and ends nothing.

    `max_lanes`: how many lanes this owner is told of. What an owner still holds when it closes is
    freed then, since its decoder would have been closed.
    """

    def __init__(self, decoder: Decoder, max_lanes: int | None = None) -> None:
        caps = decoder.caps
        self.decoder = decoder
        self._held: dict[int, Reservation | Entry] = {}
        self._open_fences: set[LentFence] = set()
        self.caps: Caps = replace(caps, max_lanes=min(max_lanes or caps.max_lanes, caps.max_lanes))

    def manifest(self) -> Manifest:
        return self.decoder.manifest()

    def reserve(self, num_tokens: int) -> Reservation:
        reservation = self.decoder.reserve(num_tokens)
        self._held[reservation.lane] = reservation
        return reservation

    def begin_import(
        self, reservation: Reservation, slot: SlotView, copies: Sequence[Copy]
    ) -> Fence:
        fence = LentFence(self.decoder.begin_import(reservation, slot, copies), self._open_fences)
        self._open_fences.add(fence)
        return fence

    def read(self, held: Reservation | Entry, layout: Layout, copy: Copy) -> bytes | memoryview:
        return self.decoder.read(held, layout, copy)

    def publish(self, reservation: Reservation) -> Entry:
        entry = self.decoder.publish(reservation)
        self._held[entry.lane] = entry
        return entry

    def free(self, held: Reservation | Entry) -> None:
        self.decoder.free(held)
        self._held.pop(held.lane, None)

    def decode_step(self, active: Sequence[tuple[Entry, int]]) -> list[memoryview]:
        return self.decoder.decode_step(active)

    def statistics(self) -> Mapping[str, int]:
        return self.decoder.statistics()

    def close(self) -> None:
        """The decoder goes on, with nothing of this owner's in it.

        Raises: DeviceError: it still imports after `FENCE_WITHIN_S`.
        """
        deadline_s = time.monotonic() + FENCE_WITHIN_S
        while not all(fence.done() for fence in list(self._open_fences)):
            if time.monotonic() > deadline_s:
                raise DeviceError(f"an import was not fenced within {FENCE_WITHIN_S} s")
        for held in self._held.values():
            self.decoder.free(held)
        self._held.clear()


class LentFence:
    """A fence that is known to be open until it was seen done, or failed."""

    def __init__(self, fence: Fence, open_fences: set[LentFence]) -> None:
        self._fence = fence
        self._open_fences = open_fences

    def done(self) -> bool:
        done = True
        try:
            done = self._fence.done()
        finally:
            if done:
                self._open_fences.discard(self)
        return done


class Pair:
    """A source and a decoder that were opened together."""

    def __init__(
        self,
        settings: Settings,
        make_decoder: Callable[[Manifest | None], Decoder],
    ) -> None:
        """`make_decoder` is called with the source's manifest where that is known first.

        Raises:
            Refused, BackendUnavailable: one of the two cannot be had; PeerDied: the source died.
        """
        self.settings = settings
        self.seed = settings.seed
        self.references: dict[tuple[tuple[int, ...], int, int], Result] = {}
        self.source_facts: dict[str, Any] = {}
        self.left_out: set[str] = set()  # what the case that runs does not show here, and why
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-check-"))
        self._num_sources = 0
        self._ready: StartedSource | None = None  # and not attached to an owner yet
        self._make_decoder = make_decoder
        self._decoder: Decoder | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def decoder(self) -> Decoder:
        """The one decoder."""
        if self._decoder is None:
            raise PairGone("the decoder was closed")
        return self._decoder

    @property
    def decodes(self) -> bool:
        """Whether tokens can be decoded: by the decoder, and with numpy to choose them."""
        return self.decoder.caps.decodes and self.num_tokens_chosen > 0

    @property
    def num_tokens_chosen(self) -> int:
        """What `max_tokens` is asked for where a request is not decoded further."""
        return 1 if importlib.util.find_spec("numpy") else 0

    @property
    def windows(self) -> list[int]:
        """The windows of sliding layers that this pair has, each once."""
        kinds = [layer.kind for layer in self.decoder_manifest.layers]
        return sorted({kind.window for kind in kinds if isinstance(kind, Sliding)})

    def start_source(self, num_slots: int) -> StartedSource:
        """A source that loads its engine meanwhile. Raises: Refused: it cannot start."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            if ready.handle.num_slots == num_slots:
                return ready
            ready.handle.close()
        return self._spawn(num_slots)

    def prompt(self, num_tokens: int, seed: int = 0) -> list[int]:
        """A prompt of ids that both sides know, another for each seed."""
        rng = random.Random(f"{self.seed} {seed} {num_tokens}")
        vocab_size = self.decoder_manifest.vocab_size
        return [rng.randrange(vocab_size) for _ in range(num_tokens)]

    def close(self) -> None:
        """End what was opened; once more is harmless."""
        decoder, self._decoder = self._decoder, None
        ready, self._ready = self._ready, None
        try:
            if ready is not None:
                ready.handle.close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            if decoder is not None:
                decoder.close()

    def _open(self) -> None:
        settings = self.settings
        if self._imitates:
            self._decoder = self._make_decoder(None)
            self._ready = self._spawn(num_slots=2)
            self.source_manifest = self._ready.handle.manifest
        else:
            self._ready = self._spawn(num_slots=2)
            if settings.decoder == "null":
                self.source_manifest = self._ready.handle.manifest
                self._decoder = self._make_decoder(self.source_manifest)
            else:  # it loads while the source does
                self._decoder = self._make_decoder(None)
                self.source_manifest = self._ready.handle.manifest
        self.decoder_manifest = self._decoder.manifest()
        with contextlib.suppress(OSError):
            facts = (self._ready.control / faulty.FACTS).read_bytes()
            self.source_facts = msgspec.json.decode(facts)

    @property
    def _imitates(self) -> bool:
        return self.settings.source == "replay" and self.settings.decoder != "null"

    def _spawn(self, num_slots: int) -> StartedSource:
        settings = self.settings
        self._num_sources += 1
        control = self._directory / f"source-{self._num_sources}"
        control.mkdir()
        engine, options = settings.source, dict(settings.source_options)
        if self._imitates:
            engine = imitation.FACTORY
            options["decoder"] = msgspec.to_builtins(self._manifest_to_imitate())
        wrapped = {
            "engine": engine,
            "options": options,
            "control": str(control),
            # A source that takes the place of one that died may find it on the device still.
            "share_device": settings.share_device or self._num_sources > 1,
        }
        handle = SourceHandle(
            faulty.FACTORY,
            wrapped,
            interpreter=settings.source_python,
            num_slots=num_slots,
            start_timeout_s=START_TIMEOUT_S,
        )
        handle.start()
        return StartedSource(handle, control)

    def _manifest_to_imitate(self) -> Manifest:
        return struct_replace(self.decoder.manifest(), layouts=self.decoder.manifest().layouts[:1])


def open_named(settings: Settings, source: Manifest | None) -> Decoder:
    """The decoder that `settings` name; `source`: the source's manifest where that is known.

    Raises:
        Refused, BackendUnavailable: it cannot be had, or its device is in use by another.
    """
    device_use("decoder", settings.decoder, settings.decoder_options, share=settings.share_device)
    sizes = size_options(settings.decoder, lanes=settings.lanes, context=settings.context)
    options: dict[str, Any] = {**sizes, **settings.decoder_options}
    if settings.decoder == "null" and source is not None:
        options["manifest"] = decoder_like(source)
    return open_decoder(settings.decoder, options)
