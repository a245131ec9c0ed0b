"""kill -9 of a source in the middle of a prefill, to its slots free; beside its plain exit.

The plain exit is that of the same process at rest with the same slab mapped on both sides and no
owner: from the signal to its pidfd. Both forms alternate, A B B A. A dead source's slots are free,
and given up with it, when the owner closes its handle. Its slab is unmapped in a thread beside the
turns, so the rest of that turn is timed, too; the next death waits until the memory is given back.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headrace.bench.faults.pair import LANES, SLOTS, CycleFailed, Pair, Setting
from headrace.runtime.requests import Request, RequestOptions
from headrace.runtime.worker import SourceHandle

PACE = {"layers": 8, "heads": 8, "head_dim": 128, "layer_ms": 15.0}
EXIT_WITHIN_S = 30.0


def run(setting: Setting, sizes_mb: tuple[int, ...], cycles: int) -> Iterator[dict[str, Any]]:
    """A row for each death, and one of what is left when all are dead."""
    for size_mb in sizes_mb:
        with Pair(setting, size_mb << 20, pace=PACE) as pair:
            before = _held(pair)
            for cycle in range(cycles):
                for form in ("plain", "owner") if cycle % 2 else ("owner", "plain"):
                    plain = form == "plain"
                    row = _plain(pair) if plain else _under_owner(pair, decoding=cycle % 4 > 1)
                    yield {
                        "measure": "death",
                        "cycle": cycle,
                        "form": form,
                        "size_mb": size_mb,
                        "slab_nbytes": SLOTS * pair.handle.slot_nbytes,
                        "load_1min": os.getloadavg()[0],
                        **row,
                    }
            yield {
                "measure": "leaks",
                "size_mb": size_mb,
                "cycles": cycles,
                "before": before,
                "after": _held(pair),
            }


def _plain(pair: Pair) -> dict[str, Any]:
    handle = pair.unattached()
    try:
        poll = select.poll()
        poll.register(handle.death_fd, select.POLLIN)
        begun_ns = time.monotonic_ns()
        os.kill(handle.pid, signal.SIGKILL)
        if not poll.poll(EXIT_WITHIN_S * 1000):
            raise CycleFailed(f"a killed source lived for {EXIT_WITHIN_S:.0f} s")
        return {"ns": time.monotonic_ns() - begun_ns}
    finally:
        handle.close(0.0)


def _under_owner(pair: Pair, *, decoding: bool) -> dict[str, Any]:
    neighbour = pair.start_neighbour() if decoding else None
    pair.timed.steps_ns.clear()
    victim = streaming(pair)
    given_up_ns = _noted(pair.handle)
    begun_ns = time.monotonic_ns()
    os.kill(pair.handle.pid, signal.SIGKILL)
    told_ns = pair.turn_until(lambda: victim.done, "the victim is told")
    turned_ns = pair.turn_until(lambda: _slots(pair) == 0, "its slots are given up")
    _until_unmapped()
    pair.owner.check_integrity()
    steps_ns = list(pair.timed.steps_ns)
    changed = pair.compare(neighbour)
    pair.new_source()
    return {
        "ns": given_up_ns() - begun_ns,
        "terminal_ns": told_ns - begun_ns,
        "turned_ns": turned_ns - begun_ns,
        "outcome": victim.outcome,
        "decoding": decoding,
        "steps_ns": steps_ns,
        "neighbours": 1 + decoding,
        "neighbours_changed": changed,
    }


def _noted(handle: SourceHandle) -> Callable[[], int]:
    """When the owner lets go of a source: proven dead, all slots free, its slab to be unmapped."""
    noted: list[int] = []
    close = handle.close

    def note_and_close(*arguments: float, aside: bool = False) -> None:
        noted.append(time.monotonic_ns())
        close(*arguments, aside=aside)

    handle.close = note_and_close  # type: ignore[method-assign,assignment]
    return lambda: noted[0]


def _until_unmapped() -> None:
    for thread in threading.enumerate():
        if thread.name == "headrace-unmap":
            thread.join()


def streaming(pair: Pair, **options: Any) -> Request:
    """A victim of which some cells are imported or being imported, and more are to come."""
    landed: list[int] = []
    asked = RequestOptions(**{"route": "streamed", "max_tokens": 0, **options})
    victim = pair.owner.submit(
        [1] * pair.victim_tokens, asked, on_progress=lambda _, nbytes, __: landed.append(nbytes)
    )
    pair.turn_until(
        lambda: bool(landed) or victim.done or pair.num_in_flight > 0, "an import was begun"
    )
    if victim.done:
        raise CycleFailed(f"the victim was over before its fault: {victim.outcome} {victim.reason}")
    return victim


def _slots(pair: Pair) -> int:
    return sum(pair.owner.statistics()["slots"].values())


def _held(pair: Pair) -> dict[str, int]:
    """What this process and its owner hold, with one source in service."""
    maps = Path("/proc/self/maps").read_text()
    tasks = Path("/proc/self/task").iterdir()
    return {
        "slots": _slots(pair),
        "slots_in_use": _slots(pair) - pair.slots("free"),
        "lanes_in_use": LANES - pair.lanes_free,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": sum(len((task / "children").read_text().split()) for task in tasks),
        "slabs_mapped": maps.count("/memfd:headrace-slab"),
        "names_in_shm": len(os.listdir("/dev/shm")),
    }
