"""Case `idle`: what an engine's processes compute while a prompt waits for its source.

vLLM runs its engine apart from whoever asks, as in `vllm serve`. Its CPU build has two processes
for that (executor `mp`): a core, and a worker, which the owner's thread runs in. Each waits for the
other's messages by looking at shared memory without rest until a second after the last of them.
Elsewhere an engine with one device is one process (`uni`), which is measured beside it.

Their CPU time (user and system, all threads, all together) is read before and after a while in
which one prompt is being loaded from a source that was stopped (SIGSTOP), and in which there is
nothing to do; A/B/B/A. The prompt is then let go on, and its answer compared with vLLM's own.
`idle_wait_ms` 0 is the same engine without the rest that the connector takes in steps that compute
nothing: what vLLM does by itself while a load is outstanding.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from headrace.bench.rows import RowFile
from headrace.bench.serve.child import parent_of
from headrace.bench.vllm.engine import Engine, EngineFailed
from headrace.bench.vllm.setting import Place, Setting, consumer, torch_source
from headrace.runtime.worker import SOURCE_MODULE

CASE: Final = "idle"
NUM_TOKENS: Final = 300
ORDER: Final = ("idle", "waiting", "waiting", "idle")
APART_AND_UNI: Final = {"VLLM_ENABLE_V1_MULTIPROCESSING": "01"}
"""The CPU build overrides `uni` where this is "1", to the letter."""
STATED_PART: Final = 4  # of the while, for what is only stated
IDLE_PART: Final = 2  # of the while, for looks at nothing to do
SETTLE_S: Final = 1.0  # after a request, so that a look begins at rest


def run(setting: Setting, place: Place, file: RowFile, say: Callable[[str], None]) -> None:
    """Measure all of it."""
    for executor, extra, looks, part in (
        ("mp", {}, ORDER, 1),
        ("uni", {}, ORDER, 1),
        ("uni", {"idle_wait_ms": 0}, ("idle", "waiting"), STATED_PART),
    ):
        wait_s = setting.sizes.wait_s / part
        say(f"executor {executor}: {len(looks)} looks of up to {wait_s:g} s")
        kv = consumer(torch_source(place), **extra)
        options = setting.engine(
            place, NUM_TOKENS, kv_transfer_config=kv, distributed_executor_backend=executor
        )
        env = APART_AND_UNI if executor == "uni" else {}
        with Engine(place.python, options, apart=True, env=env) as engine:
            source, *above = _chain(engine.pid)
            prompt, count = setting.prompt(NUM_TOKENS), setting.sizes.answer
            expected = engine.ask(prompt, count)["tokens"]
            engine.load(prompt, 1, "streamed")
            for repeat, label in enumerate(looks):
                time.sleep(SETTLE_S)
                row: dict[str, Any] = {"case": CASE, "measure": "cpu", "label": label}
                row |= {"repeat": repeat, "executor": executor, "rest": not extra}
                row["prompt_tokens"] = NUM_TOKENS
                if label == "idle":
                    row |= looked(above, wait_s / IDLE_PART)
                else:
                    row |= _waiting(engine, above, source, (prompt, count), wait_s)
                    row["right"] = row.pop("tokens") == expected
                file.append(row)


def _waiting(
    engine: Engine, above: list[int], source: int, asked: tuple[list[int], int], wait_s: float
) -> dict[str, Any]:
    prompt, count = asked
    os.kill(source, signal.SIGSTOP)
    try:
        engine.tell(
            "begin",
            tokens=prompt,
            max_tokens=count,
            params={"do_remote_prefill": True, "headrace_route": "streamed"},
        )
        time.sleep(SETTLE_S)
        used = looked(above, wait_s)
    finally:
        os.kill(source, signal.SIGCONT)
    return {**used, **engine.tell("finish")}


def looked(pids: list[int], wait_s: float) -> dict[str, Any]:
    """The CPU time of processes during a while, which is what is measured."""
    begun_ns, before_ns = time.monotonic_ns(), [cpu_ns(pid) for pid in pids]
    time.sleep(wait_s)
    after_ns, took_ns = [cpu_ns(pid) for pid in pids], time.monotonic_ns() - begun_ns
    each_ns = [after - before for after, before in zip(after_ns, before_ns, strict=True)]
    return {"cpu_ns": sum(each_ns), "each_ns": each_ns, "took_ns": took_ns}


def cpu_ns(pid: int) -> int:
    """User and system time of all threads of a process, to the kernel's tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _chain(pid: int) -> list[int]:
    """The source below `pid`, and the processes between the two, upward.

    Raises:
        EngineFailed: there is no source.
    """
    for name in os.listdir("/proc"):
        if not name.isdecimal() or SOURCE_MODULE.encode() not in _command(int(name)):
            continue
        chain = [int(name)]
        while (above := parent_of(chain[-1])) not in (0, pid):
            chain.append(above)
        if above == pid:
            return chain
    raise EngineFailed("no source was found below vLLM's engine")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
