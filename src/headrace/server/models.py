"""The models that are served, by the names that requests ask for: their text and their limits."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.engine.chat import ChatTemplate
from headrace.engine.text import ModelText
from headrace.errors import Refused
from headrace.server.terminals import Ending, Terminal

NORMALIZED: Final = 4  # how many characters a tokenizer may take for one before it looks


@dataclass(frozen=True)
class ServedModel:
    """One model. context: positions that a lane of any decoder of it holds.

    most_characters: of a text that could fit the context, and then some.
    """

    name: str
    codec: ModelText
    chat: ChatTemplate
    context: int
    vocab_size: int
    fingerprint: str
    most_characters: int

    def encode(self, text: str, *, add_special: bool = True) -> array[int]:
        """The ids of a text; see `Encoding` for where to call it.

        Raises:
            Refused: it is longer than any that fits.
        """
        if len(text) > self.most_characters:
            raise Refused(
                f"the text has {len(text)} characters, and none of more than "
                f"{self.most_characters} fits this model's context of {self.context} tokens"
            )
        return array("I", self.codec.encode(text, add_special=add_special))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_special: bool = False,
        add_generation_prompt: bool = True,
    ) -> array[int]:
        """The ids of a conversation, whose template writes its special tokens itself.

        Raises:
            Refused: the model has no template, or it does not take these messages.
        """
        text = self.chat.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=add_special)

    def check(self, tokens: Sequence[int], field: str) -> None:
        """Refuse ids that do not fit, or that the model does not know. Raises: Ending."""
        if not tokens:
            raise Ending(
                Terminal.INVALID, f"{field} is empty; give at least one token", field=field
            )
        self.room(len(tokens), None, field)  # before all of them are looked at
        if max(tokens) >= self.vocab_size:
            text = f"{field} has the token id {max(tokens)}, and the model has {self.vocab_size}"
            raise Ending(Terminal.INVALID, text, field=field)

    def room(self, num_tokens: int, max_tokens: int | None, field: str) -> int:
        """How many tokens may be decoded after a prompt: `max_tokens`, or all that fit.

        Raises:
            Ending: it does not fit the context.
        """
        left = self.context - num_tokens + 1  # the last token's own position is never needed
        if left < 1 or (max_tokens or 0) > left:
            text = (
                f"this model's context is {self.context} tokens, the prompt has {num_tokens}"
                + (f" and {max_tokens} are asked for" if max_tokens else "")
                + "; shorten it or ask for less"
            )
            raise Ending(Terminal.INVALID, text, field=field)
        return left if max_tokens is None else max_tokens


def open_model(name: str, directory: Path, context: int) -> ServedModel:
    """Read a model's tokenizer and chat template.

    Raises:
        Refused: one of its files is missing or broken.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        vocab_size = int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Refused(f"{directory / 'config.json'} does not tell the vocabulary: {exc}") from exc
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=6)
    codec = ModelText(directory)
    return ServedModel(
        name,
        codec,
        ChatTemplate(directory, name),
        context,
        vocab_size,
        f"fp_{digest.hexdigest()}",
        NORMALIZED * codec.longest_token * context,
    )
