"""`/tokenize`: the ids of a text or of a conversation, as a completion would get them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from headrace.errors import Refused
from headrace.server import replies
from headrace.server.bodies import TokenizeBody, tokenize_of
from headrace.server.budget import Budget
from headrace.server.encoding import Encoding
from headrace.server.http import Receive, Scope, Send, read_body, send_json
from headrace.server.models import ServedModel
from headrace.server.terminals import Ending, Terminal


class Tokenizing:
    """The application of the path."""

    def __init__(
        self, models: Mapping[str, ServedModel], max_body_nbytes: int, encoding: Encoding
    ) -> None:
        self._models = models
        self._max_body_nbytes = max_body_nbytes
        self._encoding = encoding
        self._budget = Budget(4 * max_body_nbytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._budget.of_one(scope["state"]["client"]) as held:
            raw = await read_body(scope, receive, self._max_body_nbytes, held)
            try:
                reply = await self._encoding.run(
                    lambda: self._reply(raw), len(raw), scope["state"]["client"], receive
                )
            except Refused as exc:
                raise Ending(Terminal.INVALID, str(exc), field=exc.field or None) from exc
            await send_json(send, 200, reply)  # which takes as long as its client reads

    def _reply(self, raw: bytes) -> bytes:
        body = tokenize_of(raw)
        model = self._model_of(body)
        tokens = _ids(body, model)
        told = None
        if body.return_token_strs:
            told = [model.codec.text_of(each) for each in tokens]
        return replies.json_of(replies.Tokenized(len(tokens), model.context, tokens.tolist(), told))

    def _model_of(self, body: TokenizeBody) -> ServedModel:
        if body.model is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        if body.model is None:
            text = f"name a model: {', '.join(self._models)}"
            raise Ending(Terminal.INVALID, text, field="model")
        if body.model not in self._models:
            text = f"no model {body.model!r} is served here; see /v1/models"
            raise Ending(Terminal.UNKNOWN_MODEL, text, field="model")
        return self._models[body.model]


def _ids(body: TokenizeBody, model: ServedModel) -> array[int]:
    if body.prompt is not None:
        return model.encode(body.prompt, add_special=body.adds_special)
    messages = [{"role": each.role, "content": each.content} for each in body.messages or ()]
    return model.encode_chat(
        messages,
        add_special=body.adds_special,
        add_generation_prompt=body.add_generation_prompt,
    )
