"""A vLLM engine in a child process, as the benchmark's own process sees it."""

from __future__ import annotations

import json
import re
import socket
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

from headrace.bench.vllm.setting import ENGINE_VARIABLES
from headrace.errors import HeadraceError
from headrace.process import ChildProcess

CHILD: Final = "headrace.bench.vllm.child"
ANSWER_WITHIN_S: Final = 900.0
END_WITHIN_S: Final = 60.0
_CAUSE: Final = re.compile(r"\w*(Error|Refused|Exception|Unavailable)\b.*")


class EngineFailed(HeadraceError):
    """An engine did not start or did not answer; the text tells what it said."""


class Engine:
    """One vLLM engine from its start to the end of the block.

    options: what vLLM's `LLM` takes. apart: whether vLLM runs its engine core in a process of its
    own. pid: of the process that was started.
    """

    def __init__(
        self,
        python: str,
        options: Mapping[str, Any],
        *,
        apart: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Raises EngineFailed if vLLM does not start."""
        with ExitStack() as undo:
            self._log = undo.enter_context(tempfile.TemporaryFile("w+b"))
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart)), **ENGINE_VARIABLES}
                self._child = ChildProcess.spawn(
                    CHILD,
                    [str(theirs.fileno())],
                    interpreter=python,
                    inherit=[theirs.fileno()],
                    env={**variables, **(env or {})},
                    stderr=self._log,
                )
            undo.callback(self._child.close)
            self.pid = self._child.pid
            self._lines = undo.enter_context(ours.makefile("rw"))
            ours.settimeout(ANSWER_WITHIN_S)
            self.about = self.tell("open", options=dict(options))
            self._stack = undo.pop_all()

    def tell(self, what: str, **given: Any) -> dict[str, Any]:
        """Have it do something, and return what it tells.

        Raises:
            EngineFailed: it failed, died or did not answer.
        """
        try:
            self._lines.write(json.dumps({"do": what, **given}) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError as exc:
            raise EngineFailed(f"vLLM did not answer to {what}: {exc}; {self._said()}") from exc
        if not line:
            raise EngineFailed(f"vLLM ended at {what}: {self._said()}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise EngineFailed(f"vLLM at {what}: {answer['failed']}; {self._said()}")
        return answer

    def ask(
        self, tokens: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Ask one prompt alone; see `child.Server.ask`. params: its `kv_transfer_params`."""
        given = None if params is None else dict(params)
        return self.tell("ask", tokens=list(tokens), max_tokens=max_tokens, params=given)

    def load(self, tokens: Sequence[int], max_tokens: int, route: str) -> dict[str, Any]:
        """Ask one prompt that a source prefills by this route."""
        params = {"do_remote_prefill": True, "headrace_route": route}
        return self.ask(tokens, max_tokens, params)

    def close(self) -> None:
        """End it, in good order if it answers."""
        with self._stack:
            try:
                self.tell("close")
            except EngineFailed:
                return
            self._child.wait(END_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _said(self) -> str:
        """What of its log tells why it failed: the first error, or else the last line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        causes = [found.group() for line in lines if (found := _CAUSE.search(line))]
        last = next((line for line in reversed(lines) if line), "nothing")
        return f"its log says: {causes[0] if causes else last}"
