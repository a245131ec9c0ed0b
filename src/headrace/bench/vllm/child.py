"""The process of one vLLM engine: it does what it is told over a socket, a JSON line at a time.

It runs in vLLM's environment, where headrace has no more than its core.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict

from headrace.errors import LocalProtocolError
from headrace.process import die_with_parent

MODULE = "headrace.bench.vllm.connector"  # where vLLM loaded it from, if it did


def main(arguments: list[str]) -> int:
    """Serve until told to close. The argument is the socket's descriptor."""
    die_with_parent()
    with socket.socket(fileno=int(arguments[0])) as channel, channel.makefile("rw") as lines:
        server = Server()
        for line in lines:
            told = json.loads(line)
            what = told.pop("do")
            try:
                answer = getattr(server, what)(**told)
            except Exception as exc:  # of vLLM any: it is told, and the parent decides
                answer = {"failed": f"{type(exc).__name__}: {_first_line(exc)}"}
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
            if what == "close":
                return 0
    return 0


class Server:
    """The engine, once it was opened. Each method's answer is what is told."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._count = 0
        self._begun = ""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Start vLLM's engine: with what `LLM` takes."""
        import torch
        import vllm

        torch.set_num_threads(1)
        self._engine = vllm.LLM(**options).llm_engine
        scheduler = self._engine.vllm_config.scheduler_config
        return {
            "pid": os.getpid(),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        }

    def link(self, mb_s: float) -> dict[str, Any]:
        """Set the speed of the emulated link, in 1e6 bytes per second; 0 for none."""
        here = sys.modules[MODULE]
        if here.HERE.link is None:
            raise LocalProtocolError("this engine's connector has no link")
        here.HERE.link.set_mb_s(mb_s)
        return {}

    def ask(
        self, tokens: list[int], max_tokens: int, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """One prompt alone, from `add_request` on, by steps of the engine.

        Its answer's `tokens`; `ttft_ns` to the first of them and `took_ns` to the last; `params`
        that vLLM's connector gave back; `measured` by headrace's, None where it loaded nothing.
        """
        ended = self._ended()
        begun_ns = time.monotonic_ns()
        name = self.add(tokens, max_tokens, params)
        first_ns, output = 0, None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not first_ns and output.outputs[0].token_ids:
                    first_ns = time.monotonic_ns()
        if output is None or not first_ns:
            raise LocalProtocolError(f"vLLM ended {name} without a token")
        requests = self._ended()[len(ended) :]
        return {
            "tokens": list(output.outputs[0].token_ids),
            "ttft_ns": first_ns - begun_ns,
            "took_ns": time.monotonic_ns() - begun_ns,
            "finish_reason": output.outputs[0].finish_reason,
            "params": output.kv_transfer_params,
            "measured": measured_of(requests[-1]) if requests else None,
        }

    def begin(self, tokens: list[int], max_tokens: int, params: dict[str, Any]) -> dict[str, Any]:
        """Add one prompt and step no further."""
        self._begun = self.add(tokens, max_tokens, params)
        return {}

    def finish(self) -> dict[str, Any]:
        """The answer to what was begun."""
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs += self.step()
        if not outputs:
            raise LocalProtocolError(f"vLLM ended {self._begun} without an output")
        return {"tokens": list(outputs[-1].outputs[0].token_ids)}

    def steps(self, seconds: float) -> dict[str, Any]:
        """Step with nothing to do, so that what the engine has put off is done."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._engine.step()
        return {}

    def blocks(self) -> dict[str, Any]:
        """Blocks of the cache that are free, and all; loads that the connector knows of."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "free": int(pool.get_num_free_blocks()),
            "all": int(pool.num_gpu_blocks),
            "requests": len(scheduler.requests),
        }

    def crowd(self, plan: list[dict[str, Any]], at_once: int, link: float) -> dict[str, Any]:
        """Many prompts, several at a time, some of them aborted; see `aborts`."""
        from headrace.bench.vllm.aborts import Crowd

        self.link(link)
        return {"answers": Crowd(self, plan, at_once).run()}

    def add(self, tokens: list[int], max_tokens: int, params: Mapping[str, Any] | None) -> str:
        """Begin a prompt; returns its name, by which vLLM's outputs and aborts know it."""
        from vllm import SamplingParams, TokensPrompt

        self._count += 1
        name = f"bench-{self._count}"
        greedy = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        if params is not None:
            greedy.extra_args = {"kv_transfer_params": dict(params)}
        prompt = TokensPrompt(prompt_token_ids=tokens)
        self._engine.add_request(name, prompt, greedy)
        return name

    def step(self) -> list[Any]:
        """One step; vLLM's outputs."""
        return list(self._engine.step())

    def abort(self, name: str) -> None:
        """Have vLLM give a prompt up."""
        self._engine.abort_request([name], internal=False)

    def close(self) -> dict[str, Any]:
        """Let go of vLLM."""
        if self._engine is not None:
            self._engine.engine_core.shutdown()
        return {}

    def _ended(self) -> list[Any]:
        here = sys.modules.get(MODULE)
        return [] if here is None else list(here.HERE.ended)


def measured_of(request: Any) -> dict[str, Any]:
    """What headrace measured of a request, raw, and how it ended."""
    told = {"outcome": request.outcome, "reason": request.reason}
    if request.measured is None:
        return told
    measured = request.measured
    return {**told, **asdict(measured), "tail_ns": measured.tail_ns}


def _first_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " / ".join(lines[:2]) or "no text"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
