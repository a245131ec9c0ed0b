"""The conformance suite of prefill engines: what every device's adapter must keep.

Subclass `PrefillEngineConformance` in a test module, give it `make_engine`, and pytest runs the
checks. Each check stands alone and says what broke; none needs a device, a process or an owner.

    class TestMyEngine(PrefillEngineConformance):
        def make_engine(self) -> PrefillEngine:
            return my_backend.open({"model": "..."})
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from msgspec.structs import replace

from headrace.backends.base import PrefillEngine
from headrace.backends.null import decoder_like
from headrace.errors import Cancelled
from headrace.geometry import check_manifest
from headrace.messages import Prefill
from headrace.plan import Plan, compile_plan
from headrace.testing.sinks import UNWRITTEN, MemorySink, ask, region_bytes

_Result = tuple[dict[tuple[int, int], bytes], bytes | None, int | None]


def require(holds: bool, text: str) -> None:
    """An assertion that tells its case where pytest does not rewrite asserts."""
    if not holds:
        raise AssertionError(text)


class PrefillEngineConformance:
    """Checks of one prefill engine.

    context: of the plans. lengths: prompts tried. group_sizes, chunks, prefill_chunks: cuttings
    tried. checks: whether it calls `sink.check` in each layer, which only an engine that computes
    all layers in one foreign call cannot.
    """

    context: ClassVar[int] = 64
    lengths: ClassVar[Sequence[int]] = (1, 2, 17, 40)
    group_sizes: ClassVar[Sequence[int]] = (1, 3, 99)
    chunks: ClassVar[Sequence[int]] = (0, 7)
    prefill_chunks: ClassVar[Sequence[int]] = (0, 9)
    checks: ClassVar[bool] = True

    def make_engine(self) -> PrefillEngine:
        """The engine under test; made once per class."""
        raise NotImplementedError("give make_engine of the engine under test")

    def make_tokens(self, num_tokens: int, seed: int = 0) -> list[int]:
        """A prompt of ids that the engine knows."""
        vocab_size = self.engine.manifest().vocab_size
        return [(seed * 13 + at * at * 7 + at) % vocab_size for at in range(num_tokens)]

    @property
    def engine(self) -> PrefillEngine:
        """The one engine of this class."""
        return _engine_of(type(self))

    def test_its_manifest_is_sound_and_stays_the_same(self) -> None:
        manifest = self.engine.manifest()
        check_manifest(manifest, "source")
        self._run(ask(self.lengths[-1]))
        require(self.engine.manifest() == manifest, "the manifest changed after a prefill")

    def test_every_cell_is_written_once_and_nothing_else(self) -> None:
        for case in self._cases():
            sink = self._run(case)
            require(sink.ended, f"{case}: no final")
            require(not sink.stray_bytes(), f"{case}: bytes beside the cells were written")
            for key, hole in self._unwritten(sink):
                raise AssertionError(f"{case}: layer, part {key}: {hole} was never written")

    def test_it_ends_as_its_manifest_says(self) -> None:
        first = self.engine.manifest().first
        for num_tokens in self.lengths:
            sink = self._run(ask(num_tokens))
            given = "token" if sink.logits is None else "logits"
            require(given == first, f"{num_tokens} tokens: ended with {given}, declares {first}")

    def test_a_cell_is_final_when_it_is_announced(self) -> None:
        """What lies in the slot at the commit is what lies there at the end."""
        for case in self._cases():
            sink = self._run(case)
            for spans, snapshot in zip(sink.commits, sink.snapshots, strict=True):
                for key, told in snapshot.items():
                    region = sink.plan.region(*key)
                    now = b"".join(
                        bytes(
                            sink.buffer[region.offset + at * region.stride :][: region.row_nbytes]
                        )
                        for at in range(region.rows)
                    )
                    require(now == told, f"{case}: {key} changed after {spans} were announced")

    def test_the_route_changes_no_byte(self) -> None:
        """Cells and source-final input are equal on all routes, for one prefill chunk."""
        wanted: dict[tuple[int, int], _Result] = {}
        for case in self._cases():
            got = _result(self._run(case))
            pairing = case.num_tokens, case.prefill_chunk
            require(got == wanted.setdefault(pairing, got), f"{case}: differs from {pairing} whole")

    def test_it_streams_by_layer_group(self) -> None:
        """On the streamed route each announcement holds cells of one layer group only."""
        for case in self._cases():
            if case.route != "streamed":
                continue
            sink = self._run(case)
            groups = [
                {layer for run in group for layer in run}
                for group in sink.plan.layer_groups(case.group_layers, case.emission)
            ]
            for spans in sink.commits:
                layers = {copy.layer for span in spans for copy in sink.plan.copies(span)}
                fits = any(layers <= group for group in groups)
                require(fits, f"{case}: layers {sorted(layers)} are of more than one layer group")

    def test_it_keeps_to_the_transfer_chunk(self) -> None:
        """On the chunked route no announcement is longer than the chunk that was asked for."""
        for case in self._cases():
            if case.route != "chunked" or not case.chunk:
                continue
            for spans in self._run(case).commits:
                longest = max(span.stop - span.start for span in spans)
                require(
                    longest <= case.chunk, f"{case}: {longest} positions were announced at once"
                )

    def test_a_prompt_leaves_nothing_for_the_next(self) -> None:
        num_tokens = self.lengths[-1]
        first = _result(self._run(ask(num_tokens)))
        self._run(ask(num_tokens), seed=1)
        require(_result(self._run(ask(num_tokens))) == first, "the same prompt gave other bytes")
        shorter = self.lengths[0]
        alone = _result(self._run(ask(shorter)))
        require(_result(self._run(ask(shorter))) == alone, "a shorter prompt gave other bytes")

    def test_another_prompt_gives_other_cells(self) -> None:
        num_tokens = self.lengths[-1]
        one, other = (self._run(ask(num_tokens), seed=seed).cells() for seed in (0, 1))
        require(one != other, "two prompts gave the same cells")

    def test_it_stops_when_it_is_withdrawn(self) -> None:
        """Cancelled at every sink call: it passes that on, and the next prompt is right."""
        for case in self._cases((self.lengths[-1],)):
            wanted = self._run(case)
            for at in range(wanted.num_calls):
                sink = MemorySink(wanted.plan, case, cancel_at=at)
                try:
                    self.engine.prefill_stream(self.make_tokens(case.num_tokens), sink)
                except Cancelled:
                    pass
                else:  # asked more or less often while it waits, it may be over before that call
                    require(not sink.num_refused, f"{case}: a cancel at call {at} was swallowed")
                    continue
                require(not sink.ended, f"{case}: a final after the cancel at call {at}")
            require(_result(self._run(case)) == _result(wanted), f"{case}: differs after cancels")

    def test_it_says_in_each_layer_that_it_is_at_work(self) -> None:
        """So a cancel reaches it within one layer, also before it has anything to write."""
        for case in self._cases((self.lengths[-1],)):
            sink = MemorySink(self._plan(case.num_tokens), case, cancel_at=0)
            try:
                self.engine.prefill_stream(self.make_tokens(case.num_tokens), sink)
            except Cancelled:
                pass
            else:
                raise AssertionError(f"{case}: it never heard that it was withdrawn")
            require(sink.num_refused == 1, f"{case}: it went on after a call said Cancelled")
            if not self.checks:
                continue
            calls = self._run(case).calls
            num_layers = len({layer for layer, part in sink.regions()})
            early = 1 if case.route == "streamed" else num_layers  # before the first cells are told
            for least, until in ((early, calls.index("commit")), (num_layers, len(calls))):
                num_checks = calls[:until].count("check")
                require(
                    num_checks >= least,
                    f"{case}: {num_checks} of its first {until} calls are of check, at least "
                    f"{least} should be",
                )

    def test_it_can_start_late(self) -> None:
        """`start` > 0 asks for positions [start, n) only; they are those of a run from 0 with the
        same cuts.
        """
        if self.engine.manifest().prefix == "none":
            return
        num_tokens = self.lengths[-1]
        for case in self._cases((num_tokens,)):
            for cuts in _cuts(num_tokens):
                whole = self._run(replace(case, cuts=cuts))
                late = self._run(replace(case, cuts=cuts, start=cuts[-1]))
                require(late.ended, f"{case}: no final from the last of {cuts}")
                require(not late.stray_bytes(), f"{case}: wrote below the last of {cuts}")
                same = late.logits == whole.logits and late.token == whole.token
                require(same, f"{case}: ends otherwise from the last of {cuts}")
                for (layer, part), (start, stop) in _places(late):
                    mine, other = (s.plan.region(layer, part, start, stop) for s in (late, whole))
                    same = region_bytes(late.buffer, mine) == region_bytes(whole.buffer, other)
                    require(same, f"{case}: {layer, part} differs from the last of {cuts}")

    # What the checks are made of.

    def _plan(self, num_tokens: int, start: int = 0) -> Plan:
        manifest = self.engine.manifest()
        decoder, layout = decoder_like(manifest), manifest.layouts[0]
        return compile_plan(decoder, layout, num_tokens, self.context, start)

    def _run(self, asked: Prefill, *, seed: int = 0) -> MemorySink:
        sink = MemorySink(self._plan(asked.num_tokens, asked.start), asked)
        tokens = self.make_tokens(asked.num_tokens, seed)
        self.engine.prefill_stream(tokens, sink, asked.start)
        return sink

    def _cases(self, lengths: Sequence[int] | None = None) -> Iterator[Prefill]:
        """Every cutting that the engine declares, the whole route first for each prefill chunk."""
        emits = self.engine.manifest().emits
        for num_tokens in lengths or self.lengths:
            for prefill_chunk in self.prefill_chunks:
                if prefill_chunk > num_tokens:
                    continue
                yield ask(num_tokens, prefill_chunk=prefill_chunk)
                for chunk in self.chunks if emits else ():
                    yield ask(num_tokens, "chunked", chunk=chunk, prefill_chunk=prefill_chunk)
                    for emission in emits:
                        for size in self.group_sizes:
                            yield ask(
                                num_tokens,
                                "streamed",
                                group_layers=size,
                                chunk=chunk,
                                prefill_chunk=prefill_chunk,
                                emission=emission,
                            )

    def _unwritten(self, sink: MemorySink) -> Iterator[tuple[tuple[int, int], str]]:
        """Cells that hold nothing but what the memory was filled with."""
        for key, region in sink.regions().items():
            lo, hi = sink.windows[key[0]]
            nbytes = region.row_nbytes // (hi - lo)
            hole = bytes([UNWRITTEN]) * nbytes
            for row in range(region.rows):
                begin = region.offset + row * region.stride
                for at in range(hi - lo):
                    if sink.buffer[begin + at * nbytes :][:nbytes] == hole:
                        yield key, f"row {row} of position {lo + at}"


_ENGINES: dict[type[PrefillEngineConformance], PrefillEngine] = {}


def _engine_of(suite: type[PrefillEngineConformance]) -> PrefillEngine:
    """Made once per class, since an engine may take minutes to load."""
    if suite not in _ENGINES:
        _ENGINES[suite] = suite().make_engine()
    return _ENGINES[suite]


def _result(sink: MemorySink) -> _Result:
    return sink.cells(), sink.logits, sink.token


def _cuts(num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Places to cut a prompt of so many tokens at, as far as it has them."""
    middle = num_tokens // 2
    for cuts in ((1,), (middle,), (middle // 2, middle), (num_tokens - 1,)):
        if all(0 < cut < num_tokens for cut in cuts):
            yield cuts


def _places(sink: MemorySink) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Each layer's part with cells, and the positions of these."""
    for layer, part in sink.regions():
        yield (layer, part), sink.windows[layer]
