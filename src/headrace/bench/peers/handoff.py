"""headrace's own rows: the real owner, a memory-only decoder and a real source process.

1-copy: from when the source has written the slot until the cache is published. 2-copy: from when
the source begins to copy its private memory into the slot until the cache is published, pipelined.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from headrace.backends.null import NullDecoder, decoder_like
from headrace.bench.peers.ends.memory import Pattern, address_of_bytes, copy_pieces
from headrace.bench.peers.pair import Copied, Moved, TransferFailed
from headrace.bench.peers.source import FILL, MOVE, prompt_of
from headrace.engine.host import HostMemory
from headrace.ids import Span
from headrace.plan import slot_layout
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle
from headrace.version import VERSION

LAYERS, HEADS, HEAD_DIM, ITEM = 32, 8, 128, 2
POSITION_NBYTES = LAYERS * 2 * HEADS * HEAD_DIM * ITEM
SPAN_NBYTES = 4 << 20  # of the 2-copy form: what is written must still be in cache when it is read
MAX_GROUP_LAYERS = LAYERS // 4  # so that writing and importing overlap at small sizes too
FILL_TOKENS = 8

SETTINGS = {
    "headrace-1-copy": "the source wrote the slot; import in pieces as the owner cuts them",
    "headrace-2-copy": "private memory, slot, reservation; spans of up to 4 MiB, at least 4 groups",
}


class Handoff:
    """One form, as `pair.Pair`: memory of one size from `open` to `close`."""

    def __init__(self, name: str, deadline_s: float = 30.0) -> None:
        """`deadline_s`: how long one transfer may take."""
        self._one_copy = name == "headrace-1-copy"
        self._deadline_s = deadline_s
        self._owner: DecoderOwner | None = None
        self._handle: SourceHandle | None = None
        self._reference: tuple[HostMemory, ...] = ()

    def start(self) -> str:
        """Nothing is started before the size is known; returns headrace's version."""
        return VERSION

    def open(self, nbytes: int) -> None:
        """Start a source and an owner for prompts of `nbytes` of KV. Raises: HeadraceError."""
        self._num_tokens = nbytes // POSITION_NBYTES
        geometry = {"layers": LAYERS, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float16"}
        private = {} if self._one_copy else {"private_nbytes": nbytes}
        engine = "headrace.bench.peers.source:open"
        handle = SourceHandle(engine, {**geometry, **private}, num_slots=1)
        self._handle = handle
        try:
            handle.start()
            manifest = decoder_like(handle.manifest)
            self._kv_offset = slot_layout(manifest, self._num_tokens).kv_offset
            decoder = NullDecoder(manifest, context=self._num_tokens, lanes=1)
            owner = DecoderOwner(decoder, context=self._num_tokens)
            self._owner = owner
            owner.attach(handle)
        except BaseException:
            self.end()
            raise

    def memcpy(self, nbytes: int) -> Copied:
        """The reference in the owner's process."""
        if not self._reference:
            self._reference = HostMemory(nbytes), HostMemory(nbytes)
        target, source = self._reference
        copy_pieces(target.address, source.address, source.nbytes)  # warms what was evicted
        before_ns = time.monotonic_ns(), time.process_time_ns()
        copy_pieces(target.address, source.address, source.nbytes)
        wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        return Copied(wall_ns - before_ns[0], cpu_ns - before_ns[1])

    def transfer(self, nbytes: int, seed: int) -> Moved:
        """One request, and a compare of all that was published. Raises: TransferFailed."""
        if self._handle is None:
            raise TransferFailed("the source was ended")
        if not self._one_copy:
            self._release(self._submit(FILL, seed, FILL_TOKENS))
        before_ns = time.process_time_ns(), _cpu_ns(self._handle.pid)
        request = self._submit(MOVE, seed, nbytes // POSITION_NBYTES)
        owner_ns = time.process_time_ns() - before_ns[0]
        source_ns = _cpu_ns(self._handle.pid) - before_ns[1]
        measured = request.measured
        if measured is None:
            raise TransferFailed(request.reason)
        begun_ns = measured.last_group_ns if self._one_copy else measured.prefill_begun_ns
        wrong = self._wrong_nbytes(request, Pattern(seed))
        self._release(request)
        # In one copy, the source's time is that of writing the slot, before the clock starts.
        cpu_ns = owner_ns + (0 if self._one_copy else source_ns)
        return Moved(measured.published_ns - begun_ns, cpu_ns, wrong)

    def close(self) -> None:
        """End source and owner; their memory goes with them."""
        self.end()

    def end(self) -> None:
        """The same. Idempotent."""
        owner, self._owner = self._owner, None
        handle, self._handle = self._handle, None
        self._reference = ()
        with ExitStack() as stack:
            if handle is not None:
                stack.callback(handle.close)
            if owner is not None:
                stack.callback(owner.close)

    def _submit(self, word: int, seed: int, num_tokens: int) -> Request:
        layer_nbytes = num_tokens * POSITION_NBYTES // LAYERS
        options = RequestOptions(
            route="whole" if self._one_copy else "streamed",
            group_layers=max(1, min(MAX_GROUP_LAYERS, SPAN_NBYTES // layer_nbytes)),
            chunk=0 if self._one_copy else SPAN_NBYTES // (POSITION_NBYTES // LAYERS),
            max_tokens=0,
            hold=True,
            deadline_s=self._deadline_s,
        )
        owner = self._open_owner()
        request = owner.submit(prompt_of(word, seed, num_tokens), options)
        owner.run_until_done(request)
        if request.outcome != "finished":
            raise TransferFailed(request.reason)
        return request

    def _release(self, request: Request) -> None:
        owner = self._open_owner()
        owner.release(request)
        if not owner.drain():
            raise TransferFailed(f"request {request.request} was not drained")

    def _wrong_nbytes(self, request: Request, pattern: Pattern) -> int:
        """Bytes of the published entry that are not the pattern's."""
        owner = self._open_owner()
        plan = owner.plan_of(request)
        wrong = 0
        for copy in plan.copies(Span(0, LAYERS, 0, plan.num_tokens)):
            offset, rows, row_nbytes, stride = copy.source
            held = owner.read(request, copy.layer, copy.part)
            address = address_of_bytes(held)
            for row in range(rows):
                at = offset + row * stride - self._kv_offset
                wrong += pattern.wrong_nbytes(address + row * row_nbytes, at, row_nbytes)
        return wrong

    def _open_owner(self) -> DecoderOwner:
        if self._owner is None:
            raise TransferFailed("the owner was ended")
        return self._owner


def _cpu_ns(pid: int) -> int:
    """Time that a process's only busy thread, its first, has run, in ns."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
