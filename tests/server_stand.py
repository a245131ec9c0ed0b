"""A server without sockets and processes, which a test steps by hand.

The application, the queue and the dispatcher are the real ones. A scripted decoder stands where the
owners would be, and raw ASGI calls stand for the clients, so that a test decides when a token
comes, when a client reads, and at which await it leaves. Time is turns of the loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from msgspec.structs import replace

from headrace.engine.text import ByteText
from headrace.errors import Refused
from headrace.messages import Ended, Reuse, Token
from headrace.server import app, events
from headrace.server.answering import Answering
from headrace.server.choices import Choice
from headrace.server.config import DecoderTable, ServeConfig
from headrace.server.decoders import ServedDecoder
from headrace.server.dispatch import Dispatcher
from headrace.server.http import App, Message
from headrace.server.models import ServedModel
from headrace.server.queue import FairQueue
from headrace.server.terminals import Ending, Terminal

MODEL = "letters"
STOP_TOKEN = 0
CONTEXT = 128
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 8,
}
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
BODIES = {"completions": COMPLETION, "chat": CHAT}
TURNS = 200


class Letters(ByteText):
    """A byte is a token, and token 0 ends a text."""

    stop_tokens: tuple[int, ...] = (STOP_TOKEN,)

    def skips(self, token: int) -> bool:
        return token == STOP_TOKEN

    def decode(self, tokens: list[int]) -> str:
        return super().decode([token for token in tokens if token != STOP_TOKEN])


class Template:
    """Role and content of each message, a line each; a message `refuse` is refused."""

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        if any(message["content"] == "refuse" for message in messages):
            raise Refused("the template does not take it", field="messages")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


def served_model(name: str = MODEL, context: int = CONTEXT) -> ServedModel:
    """A model whose tokens are bytes."""
    return ServedModel(
        name, cast(Any, Letters()), cast(Any, Template()), context, 256, "fp_letters", 1 << 20
    )


def serve_config(**tables: Any) -> ServeConfig:
    """The defaults, but for these tables."""
    return replace(ServeConfig(decoders=(DecoderTable(model=MODEL),)), **tables)


def ended(outcome: str = "finished", **more: Any) -> Ended:
    """An owner's end of a choice; the stand sets its label."""
    return replace(Ended(0, cast(Any, outcome), "", "", None, "", (), "", (), None), **more)


class ScriptedDecoder:
    """Does what the test says; a choice that is withdrawn ends in the next turn of the loop."""

    def __init__(self, stand: Stand, name: str = "one", lanes: int = 2) -> None:
        self.name = name
        self.settings = SimpleNamespace(models=(MODEL,))
        self.state: str = "ready"
        self.reason = ""
        self.lanes = lanes
        self.sources = 1
        self.taken: list[Choice] = []
        self.running: list[Choice] = []
        self.withdrawn: list[Choice] = []
        self._stand = stand

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def hopeless(self) -> bool:
        return self.state == "set aside"

    @property
    def load(self) -> float:
        return len(self.running) / self.lanes

    def has_room(self, num_tokens: int, long_from: int) -> bool:
        return self.ready and len(self.running) < self.lanes

    def submit(self, choice: Choice) -> None:
        self.taken.append(choice)
        self.running.append(choice)
        choice.withdraw = lambda: self._withdraw(choice)
        label = len(self.taken)
        self._stand.told.tell(events.Dispatched(1, choice.request, choice.index, self.name, label))

    def _withdraw(self, choice: Choice) -> None:
        self.withdrawn.append(choice)
        asyncio.get_running_loop().call_soon(
            self.end, choice, ended("cancelled", cause="cancelled")
        )

    def say(self, choice: Choice, text: str, **more: Any) -> None:
        """A token for each byte of `text`."""
        for byte in text.encode():
            choice.came(Token(0, byte, **more))

    def end(self, choice: Choice, how: Ended | None = None) -> None:
        """The owner ends it."""
        if choice in self.running:
            self.running.remove(choice)
            choice.end(how or ended())
            self._over(choice)

    def die(self, reason: str = "its owner process died") -> None:
        """All that runs fails."""
        running, self.running = self.running, []
        for choice in running:
            choice.fail(Ending(Terminal.OWNER_DIED, reason, retry_after_s=1.0))
            self._over(choice)

    def _over(self, choice: Choice) -> None:
        self._stand.dispatcher.finished(choice)
        self._stand.dispatcher.look_soon()


class Client:
    """One request at the application. sent: what came of it, message by message."""

    def __init__(
        self,
        app: App,
        path: str,
        body: bytes | Sequence[bytes],
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """state: what the connection tells of itself."""
        self.sent: list[Message] = []
        self.reads = True  # False: what is sent to it waits until it has left
        self.num_sends = 0
        self._chunks = [body] if isinstance(body, bytes) else list(body)
        self._left = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
            "client": ("10.0.0.1", 1234),
            "state": dict(state or {}),
        }
        self.task = asyncio.ensure_future(_whole(app(scope, self._receive, self._send)))

    async def _receive(self) -> Message:
        if self._chunks and not self._left.is_set():
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.num_sends += 1
        if not self.reads:
            await self._left.wait()
            return
        await asyncio.sleep(0)
        self.sent.append(message)

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    @property
    def status(self) -> int:
        """The one status line."""
        starts = [each for each in self.sent if each["type"] == "http.response.start"]
        assert len(starts) == 1, f"{len(starts)} status lines"
        assert self.sent[0] is starts[0]
        return int(starts[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode() for k, v in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(each["body"] for each in self.sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error

    @property
    def complete(self) -> bool:
        """Whether the response was ended, once."""
        ends = [
            not each.get("more_body", False)
            for each in self.sent
            if each["type"] == "http.response.body"
        ]
        assert True not in ends[:-1]
        return ends[-1:] == [True]

    @property
    def chunks(self) -> list[Any]:
        """The events of a stream, as JSON; [DONE] as it is."""
        told = self.body.decode().split("\n\n")
        assert told.pop() == ""
        return [
            each.removeprefix("data: ")
            if each == "data: [DONE]"
            else json.loads(each.removeprefix("data: "))
            for each in told
        ]


async def _whole(answer: Any) -> None:
    await answer


class Stand:
    """The application over scripted decoders; `told` has every event in order."""

    def __init__(
        self,
        *,
        lanes: int = 2,
        num_decoders: int = 1,
        keys: Sequence[str] = (),
        models: Mapping[str, ServedModel] | None = None,
        **tables: Any,
    ) -> None:
        self.config = serve_config(**tables)
        self.state: dict[str, Any] = {}  # of each connection from now on
        self.told = events.Events()
        self.events: list[events.Event] = []
        self.told.listen(self.events.append)
        queue = self.config.queue
        self.queue = FairQueue(queue.max_requests, queue.max_bytes, patience=queue.patience)
        self.dispatcher = Dispatcher(self.queue, queue, self.told)
        self.decoders = [ScriptedDecoder(self, f"d{at}", lanes) for at in range(num_decoders)]
        served = cast(list[ServedDecoder], self.decoders)
        self.dispatcher.serve(served)
        self.models = dict(models or {MODEL: served_model()})
        self.answering = Answering(self.models, self.dispatcher, self.told, self.config)
        self.app = app.build(
            self.answering,
            self.told,
            self.models,
            served,
            self.config.http,
            keys=keys,
            draining=lambda: self.dispatcher.draining,
        )
        self.complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: self.complaints.append(context)
        )

    @property
    def decoder(self) -> ScriptedDecoder:
        return self.decoders[0]

    def ask(self, kind: str = "completions", *, headers: Any = None, **body: Any) -> Client:
        """Begin a request."""
        encoded = json.dumps({**BODIES[kind], **body}).encode()
        return Client(self.app, PATHS[kind], encoded, headers=headers, state=self.state)

    def get(self, path: str, *, headers: Any = None, method: str = "GET") -> Client:
        return Client(self.app, path, b"", method=method, headers=headers, state=self.state)

    async def asked(self, kind: str = "completions", **body: Any) -> tuple[Client, list[Choice]]:
        """Begin a request and wait until all its choices are at the decoder."""
        before = len(self.decoder.taken)
        client = self.ask(kind, **body)
        num = body.get("n", 1)
        await self.until(lambda: len(self.decoder.taken) == before + num)
        return client, self.decoder.taken[before:]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Turn the loop until it holds."""
        for _ in range(TURNS):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError(f"not within {TURNS} turns; {self.events[-5:]}")

    async def quiet(self) -> None:
        """Let all that can happen happen."""
        for _ in range(40):
            await asyncio.sleep(0)

    async def done(self, client: Client) -> Client:
        """Wait until its request is answered in full."""
        await self.until(client.task.done)
        client.task.result()
        return client

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one kind."""
        return [each for each in self.events if isinstance(each, kind)]

    @property
    def answered(self) -> events.Answered:
        """The one terminal of the one request."""
        (event,) = self.of(events.Answered)
        return cast(events.Answered, event)

    async def nothing_left(self) -> None:
        """No request, choice, job or task is left, and each request had one terminal."""
        await self.quiet()
        assert self.answering.num_open == self.dispatcher.num_waiting == 0
        assert not any(each.running for each in self.decoders)
        statistics = self.queue.statistics()
        assert (statistics["waiting"], statistics["running"], statistics["nbytes"]) == (0, 0, 0)
        arrived = sorted(each.request for each in self.of(events.Arrived))
        assert sorted(each.request for each in self.of(events.Answered)) == arrived
        for decoder in self.decoders:
            withdrawn = [(each.request, each.index) for each in decoder.withdrawn]
            assert len(withdrawn) == len(set(withdrawn)), "withdrawn twice"
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        assert not self.complaints, self.complaints


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine in a loop of its own."""
    asyncio.run(test())


def reused(positions: int, remainder: Any = "source") -> Reuse:
    """What an owner tells of a kept prompt."""
    return Reuse(positions, remainder, "kept")
