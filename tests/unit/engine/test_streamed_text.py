"""The text of tokens one by one is that of all of them, cut where it is first known to stop."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.streamed_text import TextStream, cut_at_stop, settled
from headrace.engine.text import ByteText, ModelText, TextCodec
from headrace.errors import HeadraceError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
BYTES = ByteText()


class Watched:
    """A codec that says how much it was asked to decode."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self.stop_tokens = codec.stop_tokens
        self.encode = codec.encode
        self.skips = codec.skips
        self.byte_of = codec.byte_of
        self.text_of = codec.text_of
        self.decoded: list[int] = []

    def decode(self, tokens: list[int]) -> str:
        self.decoded.append(len(tokens))
        return self.codec.decode(tokens)


class Falling:
    """Ids below 256 are bytes that are read together, 256 is skipped, all others are letters."""

    stop_tokens: tuple[int, ...] = ()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [ord(letter) + 300 for letter in text]

    def text_of(self, token: int) -> str:
        return self.decode([token])

    def skips(self, token: int) -> bool:
        return token == 256

    def byte_of(self, token: int) -> int | None:
        return token if token < 256 else None

    def decode(self, tokens: list[int]) -> str:
        text, run = "", bytearray()
        for token in [*(each for each in tokens if each != 256), None]:
            if token is not None and token < 256:
                run.append(token)
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += UNFINISHED * len(run)
            run.clear()
            text += chr(token - 300) if token is not None else ""
        return text.removeprefix(" ")


def expected(codec: TextCodec, tokens: list[int], stops: list[str]) -> tuple[str, int | None]:
    """The text by decoding everything anew, and the count of tokens that it stopped at."""
    for count in range(1, len(tokens) + 1) if stops else ():
        text, stopped = cut_at_stop(codec.decode(tokens[:count]), stops)
        if stopped:
            return text, count
    return codec.decode(tokens), None


def streamed(codec: TextCodec, tokens: list[int], stops: list[str]) -> tuple[str, int | None]:
    stream = TextStream(codec, stops)
    text = ""
    for count, token in enumerate(tokens, start=1):
        text += stream.push(token)
        if stream.stopped:
            assert stream.push(token) == ""
            assert stream.finish() == ""
            return text, count
    text += stream.finish()
    assert stream.finish() == ""
    return text, None


PIECES = "héllo \N{EARTH GLOBE EUROPE-AFRICA}中#" + UNFINISHED
STOPS = st.lists(st.text(PIECES, min_size=1, max_size=4), max_size=3)
BYTE_RUNS = st.lists(
    st.one_of(
        st.sampled_from([each for letter in PIECES for each in letter.encode()]),
        st.integers(0, 255),
    ),
    max_size=40,
)


@given(BYTE_RUNS, STOPS)
def test_bytes_give_the_text_of_all_of_them(tokens: list[int], stops: list[str]) -> None:
    assert streamed(BYTES, tokens, stops) == expected(BYTES, tokens, stops)


FALLING = st.lists(
    st.one_of(
        BYTE_RUNS.map(lambda run: run[:6]),
        st.just([256]),
        st.text(PIECES, min_size=1, max_size=4).map(Falling().encode),
        st.text(PIECES, min_size=1, max_size=4).map(lambda text: list(text.encode())),
    ),
    max_size=12,
).map(lambda parts: [token for part in parts for token in part])


@given(FALLING, STOPS)
def test_bytes_that_are_read_together_wait_for_their_last(
    tokens: list[int], stops: list[str]
) -> None:
    codec = Falling()
    assert streamed(codec, tokens, stops) == expected(codec, tokens, stops)


@cache
def model_text(name: str) -> ModelText:
    from headrace.engine.models import resolve

    try:
        return ModelText(resolve(name))
    except HeadraceError as exc:
        pytest.skip(f"{name} is not pulled: {exc}")


def size_of(codec: ModelText) -> int:
    return int(codec._tokenizer.get_vocab_size())


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_model_s_tokens_give_the_text_of_all_of_them(name: str) -> None:
    codec = model_text(name)
    size = size_of(codec)
    alphabet = codec.encode(PIECES * 2, add_special=False)
    runs = [token for token in range(size) if codec.byte_of(token) is not None] or list(range(300))
    some = st.one_of(
        st.integers(0, size + 5),  # a model's rows may be more than the ids that have a text
        st.sampled_from(alphabet),
        st.sampled_from(runs),
        st.sampled_from(range(20)),
    )

    @settings(max_examples=150, deadline=None)
    @given(st.lists(some, max_size=30), STOPS)
    def holds(tokens: list[int], stops: list[str]) -> None:
        assert streamed(codec, tokens, stops) == expected(codec, tokens, stops)

    holds()


@pytest.mark.parametrize(
    ("codec", "tokens"),
    [
        (BYTES, list(b"some text of letters " * 200)),
        (BYTES, [0xF0] * 4000),
        (BYTES, [0x80] * 4000),
        (Falling(), [0xF0] * 4000),
        (Falling(), list("né".encode() * 1300)),
        (Falling(), [*Falling().encode("word "), *"é".encode(), 256] * 500),
    ],
)
def test_a_token_costs_the_same_however_long_the_text_is(
    codec: TextCodec, tokens: list[int]
) -> None:
    watched = Watched(codec)
    stream = TextStream(watched, ["never met", UNFINISHED * 9 + "x"])
    for token in tokens:
        stream.push(token)
    assert sum(watched.decoded) <= 20 * len(tokens)
    assert max(watched.decoded, default=0) <= 20


def test_what_cannot_change_is_given_at_once() -> None:
    stream = TextStream(BYTES, ["##"])
    assert [stream.push(each) for each in "aé#b".encode()] == ["a", "", "é", "", "#b"]
    plain = TextStream(Falling(), [])
    assert [plain.push(token) for token in [*Falling().encode("ab"), *"é".encode()]] == [
        "a", "b", "", "",
    ]  # fmt: skip
    assert plain.push(Falling().encode("c")[0]) == "éc"


def test_a_stop_string_of_bytes_stops_at_its_last() -> None:
    stream = TextStream(Falling(), ["\n"])
    assert [stream.push(token) for token in [*Falling().encode("ab"), 10]] == ["a", "b", ""]
    assert stream.stopped
    tokens = [*Falling().encode("a" + UNFINISHED), *"é".encode()]
    assert streamed(Falling(), tokens, [UNFINISHED + "é"]) == ("a", 4)


def test_settled_minds_every_stop_string() -> None:
    assert settled("", ("stop",)) == 0
    assert settled("so st", ("stop",)) == 3
    assert settled("abc", ("bcd", "cx")) == 1
    assert settled("caf\N{REPLACEMENT CHARACTER}", ("fé",)) == 2
    assert settled("a\N{REPLACEMENT CHARACTER}", ("a\N{REPLACEMENT CHARACTER}b",)) == 0


def test_the_earliest_stop_string_cuts() -> None:
    assert cut_at_stop("one two three", ("three", "two")) == ("one ", True)
    assert cut_at_stop("one", ("two", "")) == ("one", False)
