"""A model's own tokenizer, and bytes where there is no model."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from headrace.engine.text import ByteText, ModelText, max_positions_of, stop_tokens_of
from headrace.errors import Refused

tokenizers = pytest.importorskip("tokenizers")

VOCAB = {"<s>": 0, "<|end|>": 1, "▁a": 2, "b": 3, "<0x41>": 4, "<0xC3>": 5, "<0xA9>": 6, "plain": 7}


def made(directory: Path, *, falls_back: bool) -> ModelText:
    """A word-level tokenizer that begins each prompt with <s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="b"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("plain")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(chain if falls_back else [chain[0], chain[2]])
    tokenizer.save(str(directory / "tokenizer.json"))
    return ModelText(directory)


def test_special_tokens_are_added_once_where_they_are_asked_for(tmp_path: Path) -> None:
    text = made(tmp_path, falls_back=True)
    assert text.encode("b") == [0, 3]
    assert text.encode("b", add_special=False) == [3]
    assert text.encode("<s>b<|end|>", add_special=False) == [0, 3, 1]


def test_what_decode_leaves_out_is_told(tmp_path: Path) -> None:
    text = made(tmp_path, falls_back=True)
    assert [token for token in range(12) if text.skips(token)] == [0, 1, 8, 9, 10, 11]
    assert text.decode([0, 2, 1, 3, 11]) == " ab"
    assert [text.text_of(token) for token in (0, 1, 3, 7)] == ["<s>", "<|end|>", "b", "plain"]


def test_bytes_are_bytes_only_where_the_decoder_reads_them_so(tmp_path: Path) -> None:
    falling = made(tmp_path, falls_back=True)
    assert {token: falling.byte_of(token) for token in (3, 4, 5, 6)} == {
        3: None, 4: 0x41, 5: 0xC3, 6: 0xA9,
    }  # fmt: skip
    assert falling.decode([5, 6]) == "é"
    plain = made(tmp_path, falls_back=False)
    assert [plain.byte_of(token) for token in (3, 4, 5)] == [None, None, None]
    assert plain.decode([4]) == "<0x41>"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="has no tokenizer"):
        ModelText(tmp_path)


def test_bytes_without_a_model() -> None:
    text = ByteText()
    assert text.encode("é") == text.encode("é", add_special=False) == [0xC3, 0xA9]
    assert text.decode([0xC3, 0xA9]) == "é"
    assert text.text_of(0x41) == "A"
    assert text.text_of(0xC3) == "\N{REPLACEMENT CHARACTER}"
    assert not text.skips(0)
    assert text.byte_of(0x41) is None


def test_the_ids_that_end_a_text(tmp_path: Path) -> None:
    assert stop_tokens_of(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert stop_tokens_of(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_tokens_of(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert stop_tokens_of(tmp_path) == (5, 6)


def test_the_longest_context(tmp_path: Path) -> None:
    for config, longest in (
        ({}, 1 << 20),
        ({"max_position_embeddings": 8}, 8),
        ({"text_config": {"max_position_embeddings": 16}}, 16),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert max_positions_of(tmp_path) == longest


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """A server encodes in a thread: it would stand still if the tokenizer kept it all to itself."""
    text, done, turns = made(tmp_path, falls_back=True), threading.Event(), 0
    words = "plain " * 300_000

    def encode() -> None:
        text.encode(words)
        done.set()

    encoding = threading.Thread(target=encode)
    encoding.start()
    while not done.wait(0.001):
        turns += 1
    encoding.join()
    assert turns > 3


def test_the_longest_token_is_known(tmp_path: Path) -> None:
    assert made(tmp_path, falls_back=True).longest_token == len("<|end|>")
