"""The directory of a compiled model: what names it, and what is read of it without the vendor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.atom.artifact import digest_of, read_geometry
from headrace.errors import BackendUnavailable, Refused

META = {"layer_index": 0, "shape": [4, 2, 16, 8], "dtype": "float16", "is_auto": False}
METAS = [
    {**META, "name": f"past_key_values_{part}", "layer_type": "full_attention"} for part in (0, 1)
]
WRITTEN_NS = 1_700_000_000_000_000_001
CONFIG: dict[str, Any] = {"max_seq_len": 64, "cache_metas": METAS, "cls_name": "x"}


def write(directory: Path, config: Any = CONFIG, **files: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "rbln_config.json").write_text(text)
    for name, data in {"prefill": bytes(200_000), **files}.items():
        (directory / f"{name}.rbln").write_bytes(data)
    for path in directory.iterdir():
        os.utime(path, ns=(WRITTEN_NS, WRITTEN_NS))
    return directory


def test_a_digest_is_of_what_lies_there_wherever_that_is(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert digest_of(first) == digest_of(second)
    assert digest_of(first).startswith("sha256:")


@pytest.mark.parametrize(
    "change",
    [
        {"config": {**CONFIG, "max_seq_len": 32}},
        {"prefill": bytes(200_001)},
        {"prefill": b"\x01" + bytes(199_999)},
        {"prefill": bytes(199_999) + b"\x01"},
        {"prefill": bytes(100_000) + b"\x01" + bytes(99_999)},
        {"decoder_batch_1": b""},
    ],
)
def test_what_is_compiled_otherwise_has_another_digest(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert digest_of(write(tmp_path / "a")) != digest_of(write(tmp_path / "b", **change))


@pytest.mark.parametrize(
    ("at", "nbytes"), [(0, 2 << 20), (9 << 20, 2 << 20), (15 << 20, 2 << 20), ((17 << 20) - 1, 1)]
)
def test_a_layer_of_a_large_file_is_not_passed_over(tmp_path: Path, at: int, nbytes: int) -> None:
    """Two MiB of 17 differ, or the end, at the same time and size."""
    large = bytearray(17 << 20)
    first = write(tmp_path / "a", prefill=bytes(large))
    large[at : at + nbytes] = b"\x01" * nbytes
    assert digest_of(write(tmp_path / "b", prefill=bytes(large))) != digest_of(first)


@pytest.mark.parametrize("name", ["rbln_config.json", "prefill.rbln"])
def test_a_file_that_was_written_anew_counts_as_another(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path / "a")
    before = digest_of(directory)
    os.utime(directory / name, ns=(WRITTEN_NS, WRITTEN_NS + 1))
    assert digest_of(directory) != before


def test_a_file_counts_by_its_place(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    (first / "part").mkdir()
    (first / "prefill.rbln").rename(first / "part" / "prefill.rbln")
    assert digest_of(first) != digest_of(second)


def test_caches_are_read_without_the_vendor(tmp_path: Path) -> None:
    caches, positions = read_geometry(write(tmp_path / "a"))
    assert positions == 64
    assert [(each.name, each.shape, each.dtype) for each in caches] == [
        ("past_key_values_0", (4, 2, 16, 8), "float16"),
        ("past_key_values_1", (4, 2, 16, 8), "float16"),
    ]


@pytest.mark.parametrize(("blocks", "positions"), [(4, 64), (9, 64), (3, 48), (None, 64)])
def test_a_lane_is_as_long_as_its_blocks(
    tmp_path: Path, blocks: int | None, positions: int
) -> None:
    told = write(tmp_path / "a", {**CONFIG, "kvcache_num_blocks": blocks})
    assert read_geometry(told).positions == positions


@pytest.mark.parametrize("name", ["num_devices", "tensor_parallel_size"])
def test_a_model_for_several_cards_is_refused_by_name(tmp_path: Path, name: str) -> None:
    assert read_geometry(write(tmp_path / "one", {**CONFIG, name: 1}))
    with pytest.raises(Refused, match="compiled for 4 cards, and one is supported") as told:
        read_geometry(write(tmp_path / "four", {**CONFIG, name: 4}))
    assert told.value.field == "compiled"


def test_a_decoder_that_is_part_of_another_model_is_told_by_its_name(tmp_path: Path) -> None:
    whole = {"cls_name": "RBLNGemma3ForConditionalGenerationConfig", "language_model": CONFIG}
    with pytest.raises(
        Refused,
        match="holds a RBLNGemma3ForConditionalGeneration whose decoder is its part language_model",
    ):
        read_geometry(write(tmp_path / "a", whole))


@pytest.mark.parametrize(
    "config",
    [
        "no json",
        "[]",
        "{}",
        {**CONFIG, "max_seq_len": "many"},
        {**CONFIG, "max_seq_len": None},
        {**CONFIG, "cache_metas": None},
        {**CONFIG, "cache_metas": [1, 2]},
        {**CONFIG, "cache_metas": [{"name": "past_key_values_0"}]},
        "\udcff",
    ],
)
def test_metadata_of_another_form_is_told(tmp_path: Path, config: Any) -> None:
    directory = write(tmp_path / "a", config if config != "\udcff" else "")
    if config == "\udcff":
        (directory / "rbln_config.json").write_bytes(b"\xff")
    with pytest.raises(Refused, match=r"rbln_config\.json cannot be read: "):
        read_geometry(directory)


def test_caches_that_are_described_otherwise_are_told(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="api_missing: cache_metas"):
        read_geometry(write(tmp_path / "a", {**CONFIG, "cache_metas": METAS[:1]}))


@pytest.mark.parametrize("look", [digest_of, read_geometry])
def test_a_directory_without_metadata_is_none(tmp_path: Path, look: Any) -> None:
    for directory in (tmp_path, tmp_path / "not" / "there"):
        with pytest.raises(Refused, match=r"holds no rbln_config\.json; name the directory"):
            look(directory)


def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write(tmp_path / "a")

    def unreadable(self: Path, mode: str = "r") -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", unreadable)
    with pytest.raises(Refused, match=r"cannot be read: .*Permission denied"):
        digest_of(directory)
