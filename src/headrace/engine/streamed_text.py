"""The text of tokens that come one by one, as soon as it is known, up to a stop string.

Three things keep text back. A token may hold part of a character only. Text may turn out to begin a
stop string, which is not shown. And in vocabularies that fall back to bytes, bytes beside each
other are read together, so that none of them is known before the last.

A token is decoded behind the few that came before it, never with all of them. That is exact: what
precedes matters to a token's text only as its first byte may end a character (at most 3 bytes are
open), or by there being something at all (a leading space is dropped from a text's first word).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from headrace.engine.text import TextCodec

_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"  # what a codec makes of a character's first bytes
_CONTEXT: Final = 4  # tokens of a byte or more: one more than may be open
_MOST_CONTEXT: Final = 16  # cut back to _CONTEXT at this length, so that it is seldom decoded alone


class TextStream:
    """Takes tokens and gives their text once nothing that follows can change it.

    `stopped`: a stop string was met; the text ends before it, and later tokens add nothing.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self.stopped = False
        self._codec = codec
        self._stops = tuple(stop for stop in stops if stop)
        self._context: list[int] = []
        self._base = ""  # the context's own text, without what is open at its end
        self._open = ""  # at its end: U+FFFD, which the next token may still complete
        self._held = ""  # known, but it may begin a stop string
        self._run = _ByteRun(max((len(stop) for stop in self._stops), default=0))

    def push(self, token: int) -> str:
        """The text that is settled by this token, "" if none is."""
        if self.stopped or self._codec.skips(token):
            return ""
        byte = self._codec.byte_of(token)
        if byte is not None:
            self._run.push(token, byte)
            return self._stop_in_run()
        ended = self._end_run()
        whole = self._codec.decode([*self._context, token])
        text = self._held + ended + whole[len(self._base) :]
        self._remember(token, whole)
        return self._give(text)

    def finish(self) -> str:
        """The rest, at the end of a request that met no stop string."""
        if self.stopped:
            return ""
        rest = self._held + (self._run_text() if self._run.tokens else self._open)
        self.stopped = True
        return rest

    def _give(self, text: str) -> str:
        """Keep back of `text` what is not settled; the open character comes again, so not that."""
        shown, self.stopped = cut_at_stop(text, self._stops)
        if self.stopped:
            return shown
        count = settled(text, self._stops)
        self._held = text[count:].removesuffix(self._open)
        return text[:count]

    def _remember(self, token: int, whole: str) -> None:
        self._context.append(token)
        if len(self._context) > _MOST_CONTEXT:
            self._context = self._context[-_CONTEXT:]
            whole = self._codec.decode(self._context)
        self._open = _UNFINISHED if whole.endswith(_UNFINISHED) else ""
        self._base = whole.removesuffix(self._open)

    def _stop_in_run(self) -> str:
        """A stop string that the bytes complete, as they would read if no more followed."""
        if not self._stops:
            return ""
        if not cut_at_stop(self._held + self._open + self._run.tail(), self._stops)[1]:
            return ""
        shown, self.stopped = cut_at_stop(self._held + self._run_text(), self._stops)
        return shown if self.stopped else ""

    def _end_run(self) -> str:
        """The text of the bytes that came, now that another token follows them."""
        if not self._run.tokens:
            return ""
        text = self._run_text()
        # One of them stands for all in the context: a run is never decoded twice.
        self._context.append(self._run.tokens[-1])
        self._base = self._codec.decode(self._context)
        self._open = ""
        self._run.clear()
        return text

    def _run_text(self) -> str:
        return self._codec.decode([*self._context, *self._run.tokens])[len(self._base) :]


class _ByteRun:
    """Bytes that came beside each other: a text if all of them are UTF-8, else U+FFFD for each.

    longest: characters of the longest stop string, all that is known without decoding the run.
    """

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self._longest = longest
        self.clear()

    def clear(self) -> None:
        self.tokens.clear()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._valid = True
        self._last = ""

    def push(self, token: int, byte: int) -> None:
        self.tokens.append(token)
        if not self._valid:
            return
        try:
            text = self._decoder.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._valid = False
        else:
            self._last = (self._last + text)[-self._longest :] if self._longest else ""

    def tail(self) -> str:
        """The last characters, enough for a stop string that ends here, if no byte followed."""
        if self._valid and not self._decoder.getstate()[0]:
            return self._last
        return _UNFINISHED * min(len(self.tokens), self._longest)


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """`text` up to the first stop string in it, and whether there was one."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def settled(text: str, stops: Sequence[str]) -> int:
    """How many characters of `text`, which holds no stop string, the next token cannot touch."""
    whole = text.removesuffix(_UNFINISHED)
    return min(len(known) - _begun(known, stops) for known in (text, whole))


def _begun(text: str, stops: Sequence[str]) -> int:
    """The length of the longest suffix of `text` that begins a stop string."""
    return max(
        (
            count
            for stop in stops
            for count in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:count])
        ),
        default=0,
    )
