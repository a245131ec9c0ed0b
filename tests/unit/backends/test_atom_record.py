"""The ATOM decoder as it is opened by its options: it goes by the record of a probe, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.backends import atom
from headrace.errors import BackendUnavailable, Refused
from headrace.testing.atom_records import OPEN, recorded
from headrace.testing.fake_rebellions import compile_fake
from tests.e2e.families import directory_of

FAKES = "headrace.testing.fake_rebellions"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("atom") / "compiled"
    compile_fake(
        directory_of("llama"), directory, max_seq_len=64, attn_impl="flash_attn", partition_len=16
    )
    return directory


def opened(compiled: Path, factory: str = OPEN, **more: Any) -> atom.AtomDecoder:
    model = str(directory_of("llama"))
    return atom.open({"model": model, "compiled": str(compiled), "sdk": factory, **more})


def test_nothing_is_opened_before_a_probe(compiled: Path) -> None:
    with pytest.raises(BackendUnavailable, match="layout_unverified") as told:
        opened(compiled)
    assert told.value.hint.endswith(f"--compiled {compiled}")


@pytest.mark.parametrize(
    ("fake", "facts"),
    [
        ("open", {"number_format": "declared", "sub_blocks": False, "clears": False}),
        ("open_sub_blocks", {"number_format": "declared", "sub_blocks": True, "clears": False}),
        ("open_leaky", {"number_format": "declared", "sub_blocks": False, "clears": True}),
        ("open_loses_first", {"number_format": "declared", "sub_blocks": False, "clears": False}),
    ],
)
def test_a_decoder_goes_by_what_was_found(compiled: Path, fake: str, facts: dict[str, Any]) -> None:
    recorded(compiled, f"{FAKES}:{fake}")
    decoder = opened(compiled, f"{FAKES}:{fake}")
    assert {name: decoder.facts[name] for name in facts} == facts
    assert decoder.facts["sdk"] == "fake rebellions"
    before = decoder.statistics()["clears"]
    decoder.free(decoder.reserve(20))
    assert decoder.statistics()["clears"] - before == facts["clears"]
    decoder.close()


def test_the_cards_own_format_is_lossy(compiled: Path) -> None:
    fake = f"{FAKES}:open_custom_float16"
    recorded(compiled, fake)
    with pytest.raises(Refused, match="float32 to custom_float16: lossy"):
        opened(compiled, fake)
    decoder = opened(compiled, fake, lossy=True)
    assert decoder.facts["number_format"] == "custom_float16"
    assert not decoder.caps.reads_back
    decoder.close()


@pytest.mark.parametrize("fake", ["open_without_private_calls", "open_stale"])
def test_a_card_that_was_found_not_to_do_is_refused(compiled: Path, fake: str) -> None:
    recorded(compiled, f"{FAKES}:{fake}")
    with pytest.raises(BackendUnavailable, match=r"layout_unverified: .* step "):
        opened(compiled, f"{FAKES}:{fake}")


def test_a_compiled_model_goes_with_the_checkpoint_that_it_was_probed_with(
    compiled: Path,
) -> None:
    """Another one of the same shape would be told to a source as its own."""
    recorded(compiled)
    with pytest.raises(Refused, match="was probed with another checkpoint"):
        opened(compiled, model=str(directory_of("qwen2")))


def test_a_record_of_another_compiled_model_is_not_found(compiled: Path, tmp_path: Path) -> None:
    recorded(compiled)
    other = tmp_path / "other"
    compile_fake(directory_of("llama"), other, max_seq_len=128)
    with pytest.raises(BackendUnavailable, match="there is no record"):
        opened(other)
