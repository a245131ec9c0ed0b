"""Where a request is asked to be prefilled, and its body as the decoder gets it.

vLLM's word for it is `kv_transfer_params`: if `do_remote_prefill` is true, the decoder's connector
has a source compute the prompt's cache, and if false, vLLM computes it, also where the connector
would do otherwise without a word. A client's own word stands. What becomes of the wish is not seen
here: a connector may leave a prompt to vLLM, and a decoder may run none.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from headrace.proxy.config import ProxyConfig
from headrace.server.http import Headers, header
from headrace.server.terminals import Ending, Terminal

PREFILLER_HEADER: Final = b"x-prefiller-host-port"
"""llm-d's: a prefill server that its scheduler chose. Only whether it is there counts here."""

BYTES_PER_TOKEN: Final = 4
"""Of a text, about; a prompt is not tokenized to find out whether it is a short one."""

_PARAMS: Final = "kv_transfer_params"

Where: TypeAlias = Literal["remote", "local", "client"]
"""To be prefilled by a source, by vLLM, or as the client's own kv_transfer_params say."""

Prompt: TypeAlias = Literal["prompt", "messages"]
PROMPTS: Final[dict[str, Prompt]] = {"completions": "prompt", "chat": "messages"}
"""The field that has the prompt, by endpoint."""


class Asked(NamedTuple):
    """A body for the decoder, and where it asks its prompt to be prefilled."""

    body: bytes
    where: Where


def fields_of(raw: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a body, each as it was written.

    Raises:
        Ending: it is no JSON object.
    """
    try:
        raw.decode()
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        text = "the body is JSON and no object; send one, as OpenAI's clients do"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        text = f"the body is no JSON: {exc}"
    raise Ending(Terminal.INVALID, text)


def asked_of(raw: bytes, headers: Headers, config: ProxyConfig, prompt: Prompt) -> Asked:
    """A completion's body with its place of prefill put in; the other fields stay as written.

    Raises:
        Ending: it is no JSON object.
    """
    told = fields_of(raw)
    if bytes(told.get(_PARAMS, b"null")) != b"null":
        return Asked(raw, "client")
    remote = _is_remote(told, headers, config, prompt)
    params: dict[str, Any] = {"do_remote_prefill": remote}
    if remote:
        params["do_remote_decode"] = False
        if config.route is not None:
            params["headrace_route"] = config.route
    told[_PARAMS] = msgspec.Raw(msgspec.json.encode(params))
    return Asked(msgspec.json.encode(told), "remote" if remote else "local")


def _is_remote(
    told: dict[str, msgspec.Raw], headers: Headers, config: ProxyConfig, prompt: Prompt
) -> bool:
    match config.prefill:
        case "local":
            return False
        case "by-header" if not header(headers, PREFILLER_HEADER):
            return False
    return not config.min_tokens or prompt_tokens(told, prompt) >= config.min_tokens


def prompt_tokens(told: dict[str, msgspec.Raw], name: Prompt) -> int:
    """About how many tokens the longest prompt of a body has: ids are counted, text estimated.

    Raises:
        Ending: it is nested too deep, or has a number that is too large.
    """
    try:
        prompt = msgspec.json.decode(told.get(name, msgspec.Raw(b"null")))
    except RecursionError:  # it was read in a shallower call before
        text = f"field `{name}` is nested too deep"
        raise Ending(Terminal.INVALID, text, field=name) from None
    except msgspec.DecodeError as exc:  # numbers are looked at only now
        text = f"field `{name}` is no JSON that can be read: {exc}"
        raise Ending(Terminal.INVALID, text, field=name) from None
    if name == "messages":
        return _nbytes_of(prompt) // BYTES_PER_TOKEN
    if isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt):
        return max(_tokens_of(each) for each in prompt)
    return _tokens_of(prompt)


def _tokens_of(prompt: Any) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    return len(prompt.encode()) // BYTES_PER_TOKEN if isinstance(prompt, str) else 0


def _nbytes_of(messages: Any) -> int:
    """Of the texts in messages; what else is in there no tokenizer reads as text."""
    total = 0
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            total += len(text.encode()) if isinstance(text, str) else 0
    return total
