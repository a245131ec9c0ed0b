"""A vLLM engine in this process, taken step by step, with headrace's connector in it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.vllm.seen import SEEN, Rows

WITHIN_S: Final = 120.0
BLOCK: Final = 32


@dataclass
class Asked:
    """One request, and what came of it. reason: vLLM's finish reason, None while it runs."""

    name: str
    prompt: list[int]
    internal: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    cached: int | None = None

    @property
    def end(self) -> int:
        """The end of the last full block that leaves a token to compute."""
        return (len(self.prompt) - 1) // BLOCK * BLOCK


class Engine:
    """See the module. sources, extra: of `kv_connector_extra_config`; more: arguments of `LLM`."""

    def __init__(
        self,
        model: Path,
        sources: Sequence[dict[str, Any]],
        *,
        extra: dict[str, Any] | None = None,
        policy: str = "fail",
        **more: Any,
    ) -> None:
        SEEN.clear()
        self._llm = _load(model, sources, extra or {}, policy, more)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._names = itertools.count()
        self._asked: dict[str, Asked] = {}
        self.all_free = self.num_free

    def second(self, model: Path, sources: Sequence[dict[str, Any]]) -> None:
        """Try to have another engine in this process."""
        _load(model, sources, {}, "fail", {})

    # Requests.

    def ask(
        self, prompt: Sequence[int], *, route: str | None = "streamed", max_tokens: int = 8
    ) -> Asked:
        """Begin a request; route: None for vLLM's own prefill."""
        from vllm import SamplingParams, TokensPrompt

        params: dict[str, Any] = {"do_remote_prefill": route is not None}
        if route is not None:
            params["headrace_route"] = route
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params},
        )
        asked = Asked(f"r{next(self._names)}", list(prompt))
        given = TokensPrompt(prompt_token_ids=list(prompt))
        self._asked[asked.name] = asked
        asked.internal = self._engine.add_request(asked.name, given, sampling) or asked.name
        # vLLM may call it otherwise within.
        known = [each for each in self.scheduler.requests if each.startswith(asked.name)]
        asked.internal = next((n for n in known if n not in self._internals()), asked.internal)
        return asked

    def _internals(self) -> set[str]:
        return {each.internal for each in self._asked.values() if each.internal}

    def step(self) -> None:
        """One step of vLLM's engine."""
        for output in self._engine.step():
            asked = self._asked[output.request_id]
            completion = output.outputs[0]
            asked.tokens = list(completion.token_ids)
            asked.reason = completion.finish_reason or asked.reason
            asked.cached = output.num_cached_tokens

    def abort(self, asked: Asked) -> None:
        """As a client that went away."""
        self._engine.abort_request([asked.name])

    def run(self, *asked: Asked) -> None:
        """Step until these are done."""
        self.until(lambda: all(each.reason for each in asked), f"{asked} done")

    def settle(self) -> None:
        """Step until vLLM has no request left, and so no load whose report it waits for."""
        self.until(lambda: not self.scheduler.has_requests(), "vLLM without requests")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Step until a condition holds."""
        limit_s = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < limit_s, f"not within {WITHIN_S} s: {what}"
            self.step()

    def generate(
        self, prompt: Sequence[int], *, route: str | None = "streamed", max_tokens: int = 8
    ) -> Asked:
        """Ask, and run until it is done and nothing is left of it."""
        asked = self.ask(prompt, route=route, max_tokens=max_tokens)
        self.run(asked)
        self.settle()
        return asked

    def reset(self) -> None:
        """Empty vLLM's prefix cache."""
        assert self._engine.reset_prefix_cache()

    # What is seen of it.

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    @property
    def num_free(self) -> int:
        """Free blocks."""
        free: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free

    def imported(self, asked: Asked) -> Rows:
        """What a load had in its blocks when it was published."""
        return SEEN.published[asked.internal]

    def computed(self, asked: Asked) -> Rows:
        """What lies in the blocks that a request had, of the positions that a load would bring."""
        return SEEN.rows(SEEN.blocks[asked.internal], asked.end)

    def close(self) -> None:
        """End the engine and with it all sources."""
        self._engine.engine_core.shutdown()
        self._llm = self._engine = self._core = None
        SEEN.clear()
        gc.collect()


@contextmanager
def engine_of(model: Path, sources: Sequence[dict[str, Any]], **more: Any) -> Iterator[Engine]:
    """An engine that is closed at the end, with what is then left of it looked at."""
    with nothing_left():
        engine = Engine(model, sources, **more)
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def nothing_left() -> Iterator[None]:
    """No process below this one is left, and no name in /dev/shm that nobody else has mapped."""
    before = leftovers()
    yield
    wait_until(lambda: not leftovers() - before, lambda: f"left: {leftovers() - before}")


def leftovers() -> set[str]:
    """Processes below this one, and names in /dev/shm but for those that others have mapped.

    The semaphores of `multiprocessing` are left to its own resource tracker.
    """
    ours = {os.getpid(), *children()}
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
    for process in Path("/proc").iterdir():
        if names and process.name.isdecimal() and int(process.name) not in ours:
            with contextlib.suppress(OSError):  # it has ended, or may not be looked at
                maps = (process / "maps").read_text()
                names -= {name for name in names if f"/dev/shm/{name}" in maps}
    return {f"pid {pid}" for pid in children()} | names


def wait_until(
    condition: Callable[[], bool], what: Callable[[], str], within_s: float = 20.0
) -> None:
    """Poll what no descriptor tells, such as that a process has ended."""
    limit_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit_s, what()
        time.sleep(0.02)


def children() -> set[int]:
    """Pids of this process's children, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended since
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def sources_of() -> list[int]:
    """Pids of the source processes that this process started."""
    found = []
    for pid in children():
        with contextlib.suppress(FileNotFoundError):
            if b"source_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def prompt_of(num_tokens: int, seed: int = 0, vocab: int = 256) -> list[int]:
    """A random prompt."""
    draw = random.Random(1000 * num_tokens + seed)
    return [draw.randrange(3, vocab) for _ in range(num_tokens)]


def _load(
    model: Path,
    sources: Sequence[dict[str, Any]],
    extra: dict[str, Any],
    policy: str,
    more: dict[str, Any],
) -> Any:
    from vllm import LLM

    asked: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    return LLM(
        model=str(model),
        kv_transfer_config={
            "kv_connector": "DigestingConnector",
            "kv_connector_module_path": "tests.vllm.digesting",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"sources": list(sources), **extra},
        },
        **{**asked, **more},
    )
