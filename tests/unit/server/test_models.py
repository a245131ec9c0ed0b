"""The models that are served: their ids, their room, their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import Refused
from headrace.server.models import open_model
from headrace.server.terminals import Ending, Terminal
from tests.served import model_directory
from tests.server_stand import served_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    return model_directory(tmp_path_factory.mktemp("models") / "letters")


def test_a_model_is_read_from_its_directory(directory: Path) -> None:
    model = open_model("mine", directory, 64)
    assert list(model.encode("hi")) == [104, 105]
    messages = [{"role": "user", "content": "hi"}]
    assert model.codec.decode(list(model.encode_chat(messages))) == "user: hi\nassistant: "
    bare = model.encode_chat(messages, add_generation_prompt=False)
    assert model.codec.decode(list(bare)) == "user: hi\n"
    assert (model.name, model.context, model.vocab_size) == ("mine", 64, 256)
    assert model.codec.stop_tokens == (0,)


def test_a_fingerprint_is_that_of_the_config(directory: Path, tmp_path: Path) -> None:
    first = open_model("a", directory, 64).fingerprint
    assert first == open_model("b", directory, 32).fingerprint
    other = model_directory(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    assert open_model("a", other, 64).fingerprint != first


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"vocab_size": null}', '{"text_config": []}', None]
)
def test_a_config_that_tells_no_vocabulary_is_refused(tmp_path: Path, text: Any) -> None:
    pytest.importorskip("tokenizers")
    broken = model_directory(tmp_path / "broken")
    (broken / "config.json").unlink()
    if text is not None:
        (broken / "config.json").write_text(text)
    with pytest.raises(Refused, match=r"config\.json"):
        open_model("broken", broken, 64)


def test_the_vocabulary_of_a_model_of_several_parts_is_that_of_its_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    parts = model_directory(tmp_path / "parts")
    (parts / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 256}}))
    assert open_model("parts", parts, 64).vocab_size == 256


def test_ids_that_the_model_does_not_know_are_refused() -> None:
    model = served_model()
    model.check([0, 255], "prompt")
    for ids in ([], [256], [1, 1 << 31]):
        with pytest.raises(Ending) as told:
            model.check(ids, "prompt")
        assert told.value.field == "prompt"


@pytest.mark.parametrize(
    ("num_tokens", "asked", "room"),
    [(1, None, 10), (10, None, 1), (10, 1, 1), (1, 10, 10), (3, 4, 4)],
)
def test_there_is_room_for_what_fits(num_tokens: int, asked: int | None, room: int) -> None:
    assert served_model(context=10).room(num_tokens, asked, "prompt") == room


@pytest.mark.parametrize(("num_tokens", "asked"), [(11, None), (11, 1), (10, 2), (1, 11)])
def test_what_does_not_fit_is_refused_with_the_numbers(num_tokens: int, asked: int | None) -> None:
    with pytest.raises(Ending) as told:
        served_model(context=10).room(num_tokens, asked, "messages")
    assert told.value.field == "messages"
    assert f"10 tokens, the prompt has {num_tokens}" in told.value.text


def test_of_ids_that_do_not_fit_none_is_looked_at() -> None:
    """There may be millions of them, and the server's loop is held meanwhile."""

    class Unseen(Sequence[int]):
        def __len__(self) -> int:
            return 11

        def __getitem__(self, at: Any) -> Any:
            raise AssertionError(f"id {at} was looked at")

    with pytest.raises(Ending) as told:
        served_model(context=10).check(Unseen(), "prompt")
    assert told.value.terminal is Terminal.INVALID
    assert "10 tokens, the prompt has 11" in told.value.text
