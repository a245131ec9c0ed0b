"""Case `peer`: headrace beside what vLLM has of its own, on the same machine and the same prompts.

A client asks for the first token. With vLLM's own connectors it asks a prefill engine P first, for
one token, and then the decoder D, which loads what P left; what it waits for is both. With headrace
it asks D alone, which is fed while the prompt is being computed. `ExampleConnector` goes through
files in a memory file system, the fastest place there is for it, which are removed after each
request; `NixlConnector` through host memory. Each engine and source computes with one thread, and
prompts in one piece, since `ExampleConnector` stores no more than that.

Ways of one group are up together and taken in turns, in the reverse order in each second round.
NIXL's are a group of their own, after the others, since its engines keep a core busy each while
nothing is asked of them: `rest` rows tell what the engines of a group take then. What cannot be run
here is a row with the reason.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from headrace.bench.rows import RowFile
from headrace.bench.vllm.engine import Engine, EngineFailed
from headrace.bench.vllm.idle import looked
from headrace.bench.vllm.setting import BLOCK, MARGIN, Place, Setting, consumer, torch_source
from headrace.bench.vllm.tail import answer_of

CASE: Final = "peer"
LOCAL: Final = "vLLM alone"
HEADRACE, EXAMPLE, NIXL = "headrace", "ExampleConnector", "NixlConnector"
MEMORY: Final = Path("/dev/shm")
ASKS_P: Final = {"do_remote_decode": True, "do_remote_prefill": False}
REST_PART: Final = 5  # of the while of a look at CPU time
AFTERWARDS_S: Final = 0.05  # of steps in which P is told that its blocks were read
TRIED: Final = 2 * BLOCK + 6  # tokens of the prompt that a peer is tried with

Way = Callable[[list[int], int], dict[str, Any]]


def run(setting: Setting, place: Place, file: RowFile, say: Callable[[str], None]) -> None:
    """Measure all ways that can be had."""
    expected: dict[int, list[int]] = {}
    for group in ((HEADRACE, EXAMPLE), (NIXL,)):
        with ExitStack() as stack:
            engines = _Engines(setting, place, stack)
            ways: dict[str, Way] = {}
            for name in group:
                say(f"{name} ...")
                try:
                    ways |= engines.ways(name)
                except EngineFailed as exc:
                    if name == HEADRACE:
                        raise
                    say(f"left out: {exc}")
                    row = {"case": CASE, "measure": "load", "label": name}
                    file.append({**row, "left_out": str(exc)[:400]})
            if not ways:
                continue
            rest = looked(engines.pids, setting.sizes.wait_s / REST_PART)
            file.append({"case": CASE, "measure": "rest", "label": " and ".join(group), **rest})
            for num_tokens in setting.sizes.peer_lengths:
                _rounds(setting, file, ways, num_tokens, expected)


def _rounds(
    setting: Setting,
    file: RowFile,
    ways: dict[str, Way],
    num_tokens: int,
    expected: dict[int, list[int]],
) -> None:
    prompt, count = setting.prompt(num_tokens), setting.sizes.answer
    if LOCAL in ways:
        expected[num_tokens] = list(ways[LOCAL](prompt, count)["tokens"])
    for way in ways.values():  # what is done once is done
        way(prompt, 1)
    for repeat in range(setting.sizes.peer_rounds):
        for label in list(ways)[:: -1 if repeat % 2 else 1]:
            row: dict[str, Any] = {"case": CASE, "measure": "load", "label": label}
            row |= {"prompt_tokens": num_tokens, "repeat": repeat}
            told = ways[label](prompt, count)
            row |= {name: told[name] for name in ("p_ns", "d_ns") if name in told}
            file.append({**row, **answer_of(told, expected[num_tokens])})


class _Engines:
    """The engines of one group, which end with `stack`."""

    def __init__(self, setting: Setting, place: Place, stack: ExitStack) -> None:
        self._setting = setting
        self._place = place
        self._stack = stack
        self._longest = max(setting.sizes.peer_lengths)
        self.pids: list[int] = []

    def ways(self, name: str) -> dict[str, Way]:
        """The ways of asking that go by this name. Raises: EngineFailed."""
        if name == EXAMPLE:
            return {name: self._example()}
        return {name: self._nixl()} if name == NIXL else self._headrace()

    def _start(self, kv: dict[str, Any], env: dict[str, str] | None = None) -> Engine:
        options = self._setting.engine(
            self._place,
            self._longest,
            kv_transfer_config=kv,
            max_num_batched_tokens=self._longest + MARGIN,
            num_gpu_blocks_override=self._blocks,
        )
        engine = self._stack.enter_context(Engine(self._place.python, options, env=env))
        self.pids.append(engine.pid)
        return engine

    @property
    def _blocks(self) -> int:
        """Room for two prompts; many engines are up."""
        return 2 * -(-(self._longest + MARGIN) // BLOCK)

    def _headrace(self) -> dict[str, Way]:
        of_vllm = {"engine": {"num_gpu_blocks_override": self._blocks}}
        options = {"max_positions": self._longest, "block_size": BLOCK, **of_vllm}
        vllm_source = {"source": "vllm", "python": self._place.python, "options": options}
        ways: dict[str, Way] = {}
        for name, source in (("torch", torch_source(self._place)), ("vLLM", vllm_source)):
            engine = self._start(consumer(source))
            ways.setdefault(LOCAL, engine.ask)
            for route in ("whole", "streamed"):
                ways[f"headrace, {name} -> vLLM, {route}"] = _loading(engine, route)
        return ways

    def _example(self) -> Way:
        root = str(MEMORY) if MEMORY.is_dir() else None
        folder = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=root)
        )
        extra = {"shared_storage_path": folder}
        kv = {"kv_connector": EXAMPLE, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        prefill, decode = self._start(kv), self._start(kv)

        def ask(prompt: list[int], count: int) -> dict[str, Any]:
            try:
                return _both(lambda: prefill.ask(prompt, 1), lambda _: decode.ask(prompt, count))
            finally:
                for stored in Path(folder).iterdir():
                    shutil.rmtree(stored)

        ask(self._setting.prompt(TRIED), 1)
        return ask

    def _nixl(self) -> Way:
        kv = {"kv_connector": NIXL, "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        prefill, decode = (
            self._start(kv, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())}) for _ in "PD"
        )

        def ask(prompt: list[int], count: int) -> dict[str, Any]:
            told = _both(
                lambda: prefill.ask(prompt, 1, ASKS_P),
                lambda left: decode.ask(prompt, count, left["params"]),
            )
            prefill.tell("steps", seconds=AFTERWARDS_S)
            return told

        ask(self._setting.prompt(TRIED), 1)
        return ask


def _loading(engine: Engine, route: str) -> Way:
    def ask(prompt: list[int], count: int) -> dict[str, Any]:
        return engine.load(prompt, count, route)

    return ask


def _both(
    prefill: Callable[[], dict[str, Any]], decode: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """D's answer, with the time to its first token as a client has it that asks P before."""
    begun_ns = time.monotonic_ns()
    left = prefill()
    asked_ns = time.monotonic_ns()
    told = decode(left)
    p_ns, d_ns = asked_ns - begun_ns, told["ttft_ns"]
    took_ns = time.monotonic_ns() - begun_ns
    return {**told, "p_ns": p_ns, "d_ns": d_ns, "ttft_ns": p_ns + d_ns, "took_ns": took_ns}


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])
