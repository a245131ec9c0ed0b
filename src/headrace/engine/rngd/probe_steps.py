"""The steps of a probe of a card. Each returns bare values; what it raises is written down instead.

A step that a later one needs is taken first. Host times are medians of a few, in ms unless a name
says otherwise. What the vendor gives no call for, such as registering host memory, is not tried.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import IO, Any, Final, NamedTuple

import torch

from headrace.engine.faults import raised_as
from headrace.engine.rngd import llama
from headrace.engine.rngd.buckets import Buckets
from headrace.engine.rngd.emulated import EmulatedExecutor
from headrace.engine.rngd.executor import Executor, Ticket
from headrace.engine.rngd.program import LayerProgram
from headrace.engine.rngd.record import Reads
from headrace.engine.rngd.sdk import Sdk
from headrace.engine.rngd.tiny import TINY_LLAMA, RandomWeights
from headrace.errors import DeviceError, HeadraceError

LINK_NBYTES: Final = (1 << 20, 16 << 20, 256 << 20)
REPEATS: Final = 5
TOKENS: Final = tuple(7 + 31 * at % 500 for at in range(40))
TINY_BUCKETS: Final = Buckets((16,), 128)
ROW_AGREES_WITHIN: Final = 0.3
"""The same for the one position that is furthest off: a row of another position gives about one."""

AGREES_WITHIN: Final = 0.05
"""Largest rms difference to the emulation, as a share of the rms, that counts as the same numbers:
bf16 rounding gives about a hundredth, a wrong slot or a wrong order gives about one.
"""
PIECES: Final = ((0, len(TOKENS)),)
SECOND_PROCESS_S: Final = 60.0
KILL_WAIT_S: Final = 5.0
SILENT_S: Final = 60.0
"""After all was waited for."""

PES_PER_CHIP: Final = 8


class Step(NamedTuple):
    """name: as the record has it. needs_card: whether an emulation can take it."""

    name: str
    take: Callable[[Bench], dict[str, Any]]
    needs_card: bool = True


@dataclass(frozen=True)
class Bench:
    """What steps work with. open_card makes an executor on the card; it is closed by the step.

    say: is told what goes on.
    """

    sdk: Sdk
    device: int
    chips: int
    open_card: Callable[[Reads], Executor]
    say: Callable[[str], None]
    link_nbytes: tuple[int, ...] = LINK_NBYTES

    @property
    def where(self) -> str:
        """The device, as the vendor's calls take it."""
        return self.sdk.device(self.device)

    def empty(self, shape: tuple[int, ...], split: int | None = None) -> Any:
        """Uninitialised bf16 memory on the card; `split`: the axis that its chips share."""
        axes = [(split, self.chips)]
        return self.sdk.torch.empty_sharded(
            shape, shard_axes=axes, dtype=torch.bfloat16, device=self.where
        )

    def synchronize(self) -> None:
        event = self.sdk.torch.Event(self.where)
        event.record(self.sdk.torch.current_stream(self.where))
        event.synchronize()


def emulation(bench: Bench) -> dict[str, Any]:
    """The tiny model on the CPU, twice: the same bits, not all of them 0; how long each took."""
    runs = [_prefill(bench, EmulatedExecutor(bench.sdk)) for _ in range(2)]
    pairs = zip(*(run.cells for run in runs), strict=True)
    same = all(torch.equal(a, b) and _share(a, b) == 0.0 for a, b in pairs)
    return {"agrees": same, "first_ms": runs[0].took_ms, "second_ms": runs[1].took_ms}


def link(bench: Bench) -> dict[str, Any]:
    """Host memory that was touched before, to the card and back: GB/s by size."""
    facts: dict[str, Any] = {}
    for nbytes in bench.link_nbytes:
        host = torch.ones(nbytes // 2, dtype=torch.bfloat16)
        card = bench.empty((nbytes // 2,))
        to_card = _timed(bench, partial(card.copy_, host))
        to_host = _timed(bench, partial(host.copy_, card, non_blocking=True))
        label = f"{nbytes >> 20} MiB"
        facts[f"to card, {label}, GB/s"] = nbytes / to_card / 1e6
        facts[f"to host, {label}, GB/s"] = nbytes / to_host / 1e6
    return facts


def reads(bench: Bench) -> dict[str, Any]:
    """Whether rows of a tensor that is split over chips as caches are come to the host right."""
    shape = (65, 1, 4 * bench.chips, 8)
    pattern = torch.arange(65 * 4 * bench.chips * 8, dtype=torch.float32).reshape(shape)
    pattern = pattern.remainder(251).to(torch.bfloat16)
    card = bench.empty(shape, 2 if bench.chips > 1 else None)
    card.copy_(pattern)
    facts: dict[str, Any] = {}
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "narrow": lambda: _to_host(bench, card.narrow(0, 3, 7), (7, *shape[1:])),
        "whole": lambda: _to_host(bench, card, shape)[3:10],
    }
    for way, take in ways.items():
        try:
            with raised_as(DeviceError):  # that it cannot be done is what is to be known
                facts[way] = bool(torch.equal(take(), pattern[3:10]))
        except HeadraceError as exc:
            facts[way], facts[f"{way}, error"] = False, str(exc)
    return facts


def prefill_by_narrow(bench: Bench) -> dict[str, Any]:
    return _compared(bench, "narrow")


def prefill_by_whole(bench: Bench) -> dict[str, Any]:
    return _compared(bench, "whole")


def overlap(bench: Bench) -> dict[str, Any]:
    """Whether a copy to the host and kernels run at the same time, on two streams.

    overlap_share: what was saved of the shorter of the two, 0 = one after the other, 1 = all of it.
    """
    executor = bench.open_card("whole")
    try:
        program = LayerProgram(
            bench.sdk, executor, llama.FAMILY, TINY_LLAMA, RandomWeights(), TINY_BUCKETS
        )
        nbytes = bench.link_nbytes[-1]
        card = bench.empty((nbytes // 2,))
        card.copy_(torch.ones(nbytes // 2, dtype=torch.bfloat16))
        host = torch.ones(nbytes // 2, dtype=torch.bfloat16)
        stream = bench.sdk.torch.Stream(bench.where)

        def compute() -> None:
            for _ in range(REPEATS):
                program.run(TOKENS[:16], [(0, 16)], begin=_two, final=_one, end=_two)

        def copy() -> None:
            with stream:
                host.copy_(card, non_blocking=True)

        def both() -> None:
            copy()
            compute()

        compute()
        executor.wait()
        times = {}
        for name, work in (("kernels", compute), ("copy", copy), ("both", both)):
            times[f"{name}_ms"] = _timed(bench, work, stream.synchronize, executor.wait)
    finally:
        executor.close()
    shorter = min(times["kernels_ms"], times["copy_ms"])
    saved = times["kernels_ms"] + times["copy_ms"] - times["both_ms"]
    return {**times, "overlap_share": saved / shorter if shorter else 0.0}


def second_process(bench: Bench) -> dict[str, Any]:
    """Whether another process can use the card while this one holds it."""
    held = bench.empty((16,))
    held.copy_(torch.ones(16, dtype=torch.bfloat16))
    script = (
        "import signal\n"
        f"signal.alarm({SECOND_PROCESS_S + 5:.0f})\n"  # whatever becomes of this process
        "from headrace.engine.rngd.furiosa import import_torch_furiosa, set_fusion_once\n"
        "torch_furiosa = import_torch_furiosa()\n"
        f"set_fusion_once(torch_furiosa, {PES_PER_CHIP * bench.chips})\n"
        f"torch_furiosa.Stream({bench.where!r}).synchronize()\nprint('opened', flush=True)\n"
    )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # Files, not pipes: a pipe would be held open by whatever the vendor starts beside it.
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = child.wait(SECOND_PROCESS_S)
        except subprocess.TimeoutExpired:
            return {"opens": False, "how": f"it took more than {SECOND_PROCESS_S:.0f} s"}
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a driver is left
                child.wait(KILL_WAIT_S)
        opens = status == 0 and _said(out)[-1:] == ["opened"]
        return {"opens": opens, "status": status, "said": (_said(err)[-1:] or [""])[0][:400]}


def _said(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


STEPS: Final = (
    Step("emulation", emulation, needs_card=False),
    Step("link", link),
    Step("reads", reads),
    Step("prefill by narrow", prefill_by_narrow),
    Step("prefill by whole", prefill_by_whole),
    Step("overlap", overlap),
    Step("second process", second_process),
)


class _Run(NamedTuple):
    """What a prefill gave: K and V by layer, then logits; and how long it took."""

    cells: list[torch.Tensor]
    took_ms: float


def _prefill(bench: Bench, executor: Executor) -> _Run:
    try:
        program = LayerProgram(
            bench.sdk, executor, llama.FAMILY, TINY_LLAMA, RandomWeights(), TINY_BUCKETS
        )
        program.kernels.told = bench.say
        began = time.perf_counter()
        shape = len(TOKENS), TINY_LLAMA["num_key_value_heads"], 64
        layers = TINY_LLAMA["num_hidden_layers"]
        cells = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2 * layers)]
        tickets: list[Ticket] = []
        at: list[tuple[int, int]] = []

        def final(layer: int) -> None:
            """As the engine does: rows are read while what comes after them is queued."""
            start, stop = at[-1]
            for part in range(2):
                target = cells[2 * layer + part][start:stop]
                tickets.append(program.read(layer, part, start, stop, target))

        given = program.run(
            TOKENS, PIECES, begin=lambda *piece: at.append(piece), final=final, end=_two
        )
        logits = torch.zeros(1, TINY_LLAMA["vocab_size"], dtype=torch.bfloat16)
        tickets.append(program.read_last(given, logits))
        executor.wait()
        until = time.monotonic() + SILENT_S
        while not all(ticket.done() for ticket in tickets):
            if time.monotonic() > until:
                raise DeviceError(f"a copy did not end in {SILENT_S:.0f} s")
        return _Run([*cells, logits], (time.perf_counter() - began) * 1e3)
    finally:
        executor.close()


def _compared(bench: Bench, way: Reads) -> dict[str, Any]:
    """The tiny model on the card against the emulation: rms differences as a share of the rms."""
    wanted = _prefill(bench, EmulatedExecutor(bench.sdk))
    got = _prefill(bench, bench.open_card(way))
    shares = [_share(a, b) for a, b in zip(got.cells, wanted.cells, strict=True)]
    worst = max(_worst_row(a, b) for a, b in zip(got.cells, wanted.cells, strict=True))
    return {
        "agrees": max(shares) <= AGREES_WITHIN and worst <= ROW_AGREES_WITHIN,
        "worst_row": worst,
        "k": max(shares[:-1:2]),
        "v": max(shares[1:-1:2]),
        "logits": shares[-1],
        "took_ms": got.took_ms,
        "emulated_ms": wanted.took_ms,
    }


def _share(got: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (got.float() - wanted.float()).square().mean().sqrt()
    share = float(difference / wanted.float().square().mean().sqrt())
    return share if share == share else float("inf")  # no number, and all 0, agree with nothing


def _worst_row(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The same of the position that is furthest off, as a share of the rms of all."""
    off = (got.float() - wanted.float()).square().flatten(1).mean(1).sqrt().max()
    share = float(off / wanted.float().square().mean().sqrt())
    return share if share == share else float("inf")


def _to_host(bench: Bench, card: Any, shape: tuple[int, ...]) -> torch.Tensor:
    host = torch.zeros(shape, dtype=torch.bfloat16)
    host.copy_(card, non_blocking=True)
    bench.synchronize()
    return host


def _timed(bench: Bench, work: Callable[[], object], *waits: Callable[[], object]) -> float:
    """The median host time of the work until it is done, in ms; the first time is left out."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        work()
        for wait in waits:
            wait()
        bench.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times[1:])


def _one(layer: int) -> None:
    pass


def _two(start: int, stop: int) -> None:
    pass
