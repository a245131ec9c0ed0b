"""A conversation as the text of a prompt, by the template in a model's own directory.

A chat template is a program in Jinja that comes with the model. It runs in Jinja's sandbox, with
the names that templates on the hub are written for. The operator chose the model, a client chose
the messages: so what a template does to messages is bounded in time and in length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.errors import Refused

if TYPE_CHECKING:
    from jinja2 import Template

MAX_RENDERED: Final = 64 << 20  # characters: more than any context holds
MAX_RENDER_S: Final = 10.0


class ChatTemplate:
    """The chat template of a model directory: chat_template.jinja, else tokenizer_config.json.

    name: what a model without one is called when it is refused.

    Raises:
        Refused: the template is no Jinja, or Jinja is not installed.
    """

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self._name = name or directory.name
        config = _json_of(directory / "tokenizer_config.json")
        source = _source_of(directory, config)
        self._template = None if source is None else _compiled(source, self._name)
        self._special = _special_tokens(
            _json_of(directory / "special_tokens_map.json")
        ) | _special_tokens(config)

    @property
    def has_template(self) -> bool:
        """Whether this model takes conversations."""
        return self._template is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text; it holds its own special tokens, so encode it with add_special=False.

        messages: each with `role` and `content`. add_generation_prompt: end with the words after
        which the model answers.

        Raises:
            Refused: there is no template, it refuses the messages, or the prompt grows too long.
        """
        if self._template is None:
            raise Refused(
                f"model {self._name} has no chat template; use /v1/completions", field="model"
            )
        given = {
            **self._special,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _joined(self._template.generate(**given), time.monotonic() + MAX_RENDER_S)
        except Refused:
            raise
        except Exception as exc:  # whatever a template's own code raises, over these messages
            told = str(exc) or type(exc).__name__
            raise Refused(
                f"the chat template of {self._name} does not take these messages: {told}",
                field="messages",
            ) from exc


def _joined(pieces: Iterable[str], deadline: float) -> str:
    """The rendered text, while it is within its bounds."""
    parts, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED:
            raise Refused(
                f"the messages make a prompt of over {MAX_RENDERED} characters; shorten them",
                field="messages",
            )
        if time.monotonic() > deadline:
            raise Refused(
                f"the chat template takes over {MAX_RENDER_S:g} s for these messages; shorten them",
                field="messages",
            )
        parts.append(piece)
    return "".join(parts)


def _compiled(source: str, name: str) -> Template:
    try:
        from jinja2 import TemplateSyntaxError
    except ImportError as exc:
        raise Refused(
            f"the chat template of {name} needs jinja2; install headrace[server]"
        ) from exc
    from headrace.engine.chat_sandbox import sandbox

    try:
        return sandbox(_now).from_string(source)
    except TemplateSyntaxError as exc:
        raise Refused(
            f"the chat template of {name} is no Jinja: line {exc.lineno}: {exc.message}"
        ) from exc


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _source_of(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    told = config.get("chat_template")
    if isinstance(told, list):  # several templates, by name
        named = {each.get("name"): each.get("template") for each in told if isinstance(each, dict)}
        told = named.get("default")
    return told if isinstance(told, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which a template may name; some are told with their options."""
    found = {}
    for key, told in config.items():
        content = told.get("content") if isinstance(told, dict) else told
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _json_of(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise Refused(f"{path} is no JSON: {exc}") from exc
    return told if isinstance(told, dict) else {}
