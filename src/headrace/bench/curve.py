"""The size curve: what each route adds to a prefill, from 0.1 to 4 GB of KV.

A paced replay source imitates a device that computes KV at a set rate and has a copy engine of its
own; its owner runs in this process with a memory-only decoder. Every figure is "paced": a prefill
takes the same time on each route by construction, so what is compared is the transfer alone. The
chunked routes are given a prefill chunk of the same size, since without one they could not begin
before the prefill ends; on a real model that would change what is computed.

`auto` has a source and an owner of its own, which serve nothing else but one prompt of one token
before it, and takes its turns between the fixed routes: what it knows, its own requests taught it.
`nth` counts them from 1; what it probes the machine for is done before the first is submitted.

`ttft_ns` ends with the first token, chosen from the source's row of logits, and `publish_ns` with
the published entry; a memory-only decoder computes neither.

A link that is faster than this machine copies cannot be emulated on it. KV rate and link are then
scaled down together (`Setting.scale`), which leaves their ratio, and with it the shares, as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.backends.base import Decoder
from headrace.backends.null import NullDecoder
from headrace.bench.cpu import first_thread_ns
from headrace.bench.geometries import GEOMETRIES, Geometry, Prompt, tokens_for, transfer_nbytes
from headrace.bench.links import LinkDecoder
from headrace.bench.rows import RowFile, busy_share
from headrace.bench.stand import RequestFailed, Stand, choice_of
from headrace.engine.capacity import require_memory
from headrace.errors import Refused
from headrace.plan import slot_layout
from headrace.runtime.probe import probe
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

KEY = ("measure", "geometry", "size_gb", "route", "pace_gb_per_s", "link_gb_per_s", "repeat")
SIZES_GB = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
AUTO = "auto"
DEFAULT_WAYS = (
    "whole",
    "chunked-256",
    "chunked-1024",
    "streamed-1",
    "streamed-4",
    "streamed-8th",
    AUTO,
)
WAYS = (*DEFAULT_WAYS, "streamed-2")
GROUPS = 8  # of `streamed-8th`, about: its layer groups are an eighth of the layers
LARGE_GB = 1.0  # above it, only these geometries run by default:
LARGE = ("llama-3.1-8b", "gemma-3-12b")
LINK_LIMIT_GB = 0.5  # the largest size behind an emulated link
FIXED_REPEATS = 20
FIXED_LAYER_MS = 1.0  # a paced prefill of one token, whose tail is the fixed cost
HEADROOM_NBYTES = 512 << 20  # beside slot and lane: both processes, and what else runs

# For the estimate: copies of all KV that a row waits for, what it takes beside them (the idle
# check, the drain), the start of a stand, and making and dropping a slab that two processes map.
_COPIES, _REST_S, _START_S, _SLAB_S_PER_GB = 2.5, 0.12, 0.6, 3.0


class Setting(NamedTuple):
    """How fast KV is computed and carried, in GB/s (1e9 bytes); 0 is as fast as it goes.

    scale: both stand for rates that are this much larger.
    """

    pace_gb_per_s: float
    link_gb_per_s: float = 0.0
    scale: float = 1.0

    @property
    def words(self) -> str:
        """What a row says of it."""
        if not self.pace_gb_per_s:
            pace = "unpaced"
        else:
            pace = f"paced at {self.pace_gb_per_s:g} GB/s of KV"
        if not self.link_gb_per_s:
            return pace
        words = f"{pace}, emulated link of {self.link_gb_per_s:g} GB/s"
        if self.scale == 1:
            return words
        real = f"{self.pace_gb_per_s / self.scale:g} and {self.link_gb_per_s / self.scale:g}"
        return f"{words}, both scaled by {self.scale:g}: they stand for {real} GB/s"


def linked(pace_gb_per_s: float, link_gb_per_s: float, scale: float) -> Setting:
    """A KV rate behind an emulated link, both scaled down by `scale`."""
    return Setting(pace_gb_per_s * scale, link_gb_per_s * scale, scale)


@dataclass(frozen=True, slots=True)
class Cell:
    """One size of one geometry in one setting; `size_gb` 0 is a prompt of one token."""

    geometry: Geometry
    size_gb: float
    setting: Setting
    routes: tuple[str, ...]
    repeats: int

    @property
    def prompt(self) -> Prompt:
        if not self.size_gb:
            return Prompt(1, transfer_nbytes(self.geometry, 1), beyond_model=False)
        return tokens_for(self.geometry, self.size_gb * 1e9)

    @property
    def key(self) -> dict[str, Any]:
        """What all its rows have in common and are found by."""
        return {
            "geometry": self.geometry.name,
            "size_gb": self.size_gb,
            "pace_gb_per_s": self.setting.pace_gb_per_s,
            "link_gb_per_s": self.setting.link_gb_per_s,
        }

    @property
    def words(self) -> str:
        """What is measured, for a person who waits for it."""
        size = f"{self.size_gb:g} GB" if self.size_gb else "fixed cost"
        tokens = f"{self.prompt.num_tokens} tokens"
        return f"{self.geometry.name}, {size} ({tokens}), {self.setting.words}"

    def rows(self) -> Iterator[dict[str, Any]]:
        """The keys of its rows in the order in which they are measured.

        The routes go round by one in each second repeat, and backwards in the one after it.
        """
        measure = "hand-off" if self.size_gb else "fixed"
        for repeat in range(self.repeats):
            by = repeat // 2 % len(self.routes)
            order = self.routes[by:] + self.routes[:by]
            for route in order if repeat % 2 == 0 else reversed(order):
                yield {"measure": measure, **self.key, "route": route, "repeat": repeat}

    def seconds(self, gb_per_s: float) -> float:
        """How long it is expected to take where a copy has this speed, GB/s."""
        pace, link = self.setting.pace_gb_per_s, self.setting.link_gb_per_s
        copy_s = self.size_gb / gb_per_s
        each = _COPIES * copy_s + _REST_S
        each += self.size_gb / pace if pace else 0.0
        each += self.size_gb / link / 2 if link else 0.0  # whole waits for all of it, others do not
        stands = len({route == AUTO for route in self.routes})
        start = stands * (_START_S + _SLAB_S_PER_GB * self.size_gb + each)
        return start + len(self.routes) * self.repeats * each


def label_of(way: str, geometry: Geometry) -> str:
    """The route as rows name it: `streamed-8th` is told by its number of layers."""
    return f"streamed-{_layers_of(way, geometry)}" if way.startswith("streamed") else way


def options_of(label: str) -> RequestOptions:
    """The request that a row's route stands for."""
    if label == AUTO:
        return RequestOptions(route="auto", max_tokens=1)
    if label == "whole":
        return RequestOptions(route="whole", max_tokens=1)
    route, _, number = label.partition("-")
    if route == "streamed":
        return RequestOptions(route="streamed", group_layers=int(number), max_tokens=1)
    chunk = int(number)
    return RequestOptions(route="chunked", chunk=chunk, prefill_chunk=chunk, max_tokens=1)


def repeats_for(size_gb: float) -> int:
    """How often a size is measured unless it is asked for otherwise."""
    if size_gb <= 0.5:
        return 10
    return 5 if size_gb <= 1 else 3


def cells_of(
    geometries: Sequence[str],
    sizes_gb: Sequence[float],
    settings: Sequence[Setting],
    ways: Sequence[str] = DEFAULT_WAYS,
    *,
    repeats: int = 0,
    all_large: bool = False,
) -> list[Cell]:
    """The cells to measure, and before those of each geometry and setting its fixed cost.

    `repeats`: of every cell; 0 = `repeats_for` and FIXED_REPEATS. `all_large`: every geometry above
    LARGE_GB too.

    Raises:
        Refused: a geometry or a route is unknown, or none is named.
    """
    for names, known, what in ((geometries, GEOMETRIES, "geometry"), (ways, WAYS, "route")):
        if not names:
            raise Refused(f"no {what} is named; known: {', '.join(known)}", field=what)
        for name in names:
            if name not in known:
                raise Refused(f"unknown {what} {name!r}; known: {', '.join(known)}", field=what)
    cells = []
    for setting in settings:
        for geometry in (GEOMETRIES[name] for name in geometries):
            cells.append(Cell(geometry, 0.0, setting, ("whole",), repeats or FIXED_REPEATS))
            for size_gb in sizes_gb:
                large = size_gb > LARGE_GB and geometry.name not in LARGE and not all_large
                if large or (setting.link_gb_per_s and size_gb > LINK_LIMIT_GB):
                    continue
                routes = tuple(dict.fromkeys(label_of(way, geometry) for way in ways))
                times = repeats or repeats_for(size_gb)
                cells.append(Cell(geometry, size_gb, setting, routes, times))
    return cells


def run(cells: Sequence[Cell], file: RowFile, say: Callable[[str], None]) -> None:
    """Measure what `file` does not hold yet; `say` is told how far it is.

    A cell that does not fit into memory is told, and a row says so; where only the second source
    and owner of `auto` do not fit, that is left out alone.

    Raises:
        RequestFailed: a request did not finish.
    """
    left = [cell for cell in cells if any(row not in file for row in cell.rows())]
    gb_per_s = 1 / probe().copy_ns_per_byte if left else 1.0
    seconds = sum(cell.seconds(gb_per_s) for cell in left)
    say(f"{len(left)} of {len(cells)} cells are to be measured, in about {seconds / 60:.1f} min")
    for number, cell in enumerate(left, 1):
        say(f"{number}/{len(left)}: {cell.words}: about {cell.seconds(gb_per_s):.0f} s")
        missing = [row for row in cell.rows() if row not in file]
        skipped = _skipped(cell, {row["route"] for row in missing}, file, say)
        missing = [row for row in missing if row["route"] not in skipped]
        with ExitStack() as stack:
            benches = {
                of_auto: stack.enter_context(CurveBench(cell, warm_up=not of_auto))
                for of_auto in dict.fromkeys(row["route"] == AUTO for row in missing)
            }
            for row in missing:
                bench = benches[row["route"] == AUTO]
                file.append({**row, **bench.measure(options_of(row["route"]))})


def _skipped(cell: Cell, routes: set[str], file: RowFile, say: Callable[[str], None]) -> set[str]:
    """Those of the routes that there is no memory for; `file` and `say` are told why."""
    nbytes = _needed_nbytes(cell)
    tries = [("", nbytes, routes)]
    if AUTO in routes and len(routes) > 1:
        tries.append((AUTO, 2 * nbytes, {AUTO}))
    for route, needed, left_out in tries:
        what = f"{cell.words}, auto beside the others" if route else cell.words
        try:
            require_memory(needed + HEADROOM_NBYTES, what)
        except Refused as exc:
            say(f"skipped: {exc}")
            row = {"measure": "skipped", **cell.key, "route": route, "repeat": 0}
            file.append({**row, "skipped": str(exc)})
            return left_out
    return set()


class CurveBench:
    """One source, slab, lane and owner, for prompts of one length in one setting."""

    def __init__(self, cell: Cell, *, warm_up: bool = True, decoder: Decoder | None = None) -> None:
        """`warm_up`: with a prompt of the full length by the whole route, else of one token.

        `decoder`: a memory-only one for the cell's prompt, closed with the bench; by default one
        of host memory.
        """
        self._cell = cell
        self._prompt = cell.prompt
        self._served = 0
        num_tokens, setting = self._prompt.num_tokens, cell.setting
        with ExitStack() as undo:
            source = SourceHandle("replay", _source_options(cell), num_slots=1)
            undo.callback(source.close)
            source.start()
            if decoder is None:
                decoder = NullDecoder(cell.geometry.decoder(), context=num_tokens, lanes=1)
            undo.callback(decoder.close)
            if setting.link_gb_per_s:
                decoder = LinkDecoder(decoder, setting.link_gb_per_s * 1e9)
            self._stand = Stand(source, decoder, context=num_tokens)
            undo.pop_all()
        try:
            self._stand.serve([1] * (num_tokens if warm_up else 1), options_of("whole"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CurveBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the owner, its decoder and its source."""
        self._stand.close()

    def measure(self, options: RequestOptions) -> dict[str, Any]:
        """One hand-off: its times in ns from request and source, bytes and CPU.

        CPU of the owner is None behind a link, where it polls.
        """
        busy, load = busy_share(0.05), os.getloadavg()[0]
        pid, setting = self._stand.handle.pid, self._cell.setting
        begun = time.process_time_ns(), first_thread_ns(pid)
        request = self._stand.serve([1] * self._prompt.num_tokens, options)
        self._served += 1
        owner_ns = time.process_time_ns() - begun[0]
        source_ns = first_thread_ns(pid) - begun[1]
        measured = request.measured
        if measured is None:
            raise RequestFailed(request.reason)
        return {
            "setting": setting.words,
            "num_tokens": self._prompt.num_tokens,
            "beyond_model": self._prompt.beyond_model,
            "group_layers": options.group_layers if options.route == "streamed" else 0,
            "chunk": options.chunk,
            "prefill_chunk": options.prefill_chunk,
            "choice": choice_of(request),
            "nth": self._served if options.route == "auto" else 0,
            "prefill_ns": measured.source_final_ns - measured.prefill_begun_ns,
            "tail_ns": measured.tail_ns,
            "tail_from_last_group_ns": measured.tail_from_last_group_ns,
            "publish_ns": measured.published_ns - measured.submitted_ns,
            "ttft_ns": measured.first_token_ns - measured.submitted_ns,
            "import_ns": measured.import_ns,
            "kv_nbytes": measured.kv_nbytes,
            "last_group_nbytes": measured.last_group_nbytes,
            "nbytes_before_final": measured.nbytes_before_final,
            "groups": measured.groups,
            "imports": measured.imports,
            "owner_cpu_ns": None if setting.link_gb_per_s else owner_ns,
            "source_cpu_ns": source_ns,
            "machine_busy_before": round(busy, 3),
            "load_1min": load,
        }


def _layers_of(way: str, geometry: Geometry) -> int:
    number = way.partition("-")[2]
    return -(-geometry.layers // GROUPS) if number == "8th" else int(number)


def _needed_nbytes(cell: Cell) -> int:
    """A slot and a lane."""
    return 2 * slot_layout(cell.geometry.decoder(), cell.prompt.num_tokens).nbytes


def _source_options(cell: Cell) -> dict[str, Any]:
    prompt, pace = cell.prompt, cell.setting.pace_gb_per_s
    longest = max(cell.geometry.longest, prompt.num_tokens)
    options = cell.geometry.options(max_positions=longest)
    if not pace:
        return options
    layer_ms = prompt.nbytes / (pace * 1e6) / cell.geometry.layers
    if not cell.size_gb:
        layer_ms = FIXED_LAYER_MS
    return {**options, "layer_ms": layer_ms, "writes_beside": True}
