from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.engine.checkpoint import (
    BLOCK_NBYTES,
    INNER_BLOCKS,
    fingerprint,
    read_header,
    tensor_entries,
)
from headrace.errors import Refused

Tensors = dict[str, tuple[str, list[int], bytes]]

BIG_NBYTES = 40 * BLOCK_NBYTES

TENSORS: Tensors = {
    "b.weight": ("F32", [2, 3], bytes(range(24))),
    "a.weight": ("BF16", [BIG_NBYTES // 2], bytes(BIG_NBYTES)),
    "c.packed": ("F4", [7], b"\x01\x02\x03\x04"),
    "d.empty": ("F32", [0, 4], b""),
}


def write_safetensors(file: Path, tensors: Tensors) -> None:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    payload = b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(payload), len(payload) + len(raw)]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        payload += raw
    header = json.dumps(table).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + payload)


def write_model(
    directory: Path, tensors: Tensors = TENSORS, config: dict[str, object] | None = None
) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config or {"hidden_size": 4}))
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def with_byte(tensors: Tensors, name: str, at: int) -> Tensors:
    dtype, shape, raw = tensors[name]
    changed = bytearray(raw)
    changed[at] ^= 0xFF
    return {**tensors, name: (dtype, shape, bytes(changed))}


def test_fingerprint_is_stable_and_named(tmp_path: Path) -> None:
    first = fingerprint(write_model(tmp_path / "a"))
    assert first == fingerprint(write_model(tmp_path / "b"))
    assert first.startswith("sha256:")
    assert len(first) == len("sha256:") + 64


@pytest.mark.parametrize("name", ["b.weight", "c.packed"])
def test_any_byte_of_a_small_tensor_counts(tmp_path: Path, name: str) -> None:
    base = fingerprint(write_model(tmp_path / "base"))
    for at in range(len(TENSORS[name][2])):
        assert fingerprint(write_model(tmp_path / str(at), with_byte(TENSORS, name, at))) != base


@pytest.mark.parametrize("at", [0, BLOCK_NBYTES - 1, BIG_NBYTES - BLOCK_NBYTES, BIG_NBYTES - 1])
def test_the_ends_of_a_large_tensor_count(tmp_path: Path, at: int) -> None:
    changed = write_model(tmp_path / "changed", with_byte(TENSORS, "a.weight", at))
    assert fingerprint(changed) != fingerprint(write_model(tmp_path / "base"))


def test_a_change_spread_over_a_large_tensor_is_seen_though_it_is_sampled(tmp_path: Path) -> None:
    dtype, shape, raw = TENSORS["a.weight"]
    middle = slice(BLOCK_NBYTES, BIG_NBYTES - BLOCK_NBYTES)
    changed = bytearray(raw)
    changed[middle] = b"\x01" * len(changed[middle])
    assert BIG_NBYTES > (INNER_BLOCKS + 2) * BLOCK_NBYTES
    tuned = write_model(tmp_path / "tuned", {**TENSORS, "a.weight": (dtype, shape, bytes(changed))})
    assert fingerprint(tuned) != fingerprint(write_model(tmp_path / "base"))


@pytest.mark.parametrize(
    "tensors",
    [
        {**TENSORS, "b.weight": ("F32", [3, 2], TENSORS["b.weight"][2])},
        {**TENSORS, "b.weight": ("I32", [2, 3], TENSORS["b.weight"][2])},
        {("x" if name == "b.weight" else name): tensor for name, tensor in TENSORS.items()},
        {name: tensor for name, tensor in TENSORS.items() if name != "d.empty"},
    ],
    ids=["shape", "dtype", "name", "missing"],
)
def test_the_table_of_tensors_counts(tmp_path: Path, tensors: Tensors) -> None:
    base = fingerprint(write_model(tmp_path / "base"))
    assert fingerprint(write_model(tmp_path / "other", tensors)) != base


def test_sharding_and_order_do_not_count(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole")
    sharded = write_model(tmp_path / "sharded", dict(reversed(list(TENSORS.items())[:2])))
    write_safetensors(sharded / "more.safetensors", dict(list(TENSORS.items())[2:]))
    assert fingerprint(sharded) == fingerprint(whole)


def test_volatile_config_keys_do_not_count_at_any_depth(tmp_path: Path) -> None:
    base: dict[str, object] = {"hidden_size": 4, "text_config": {"window": 8}, "kinds": [{"w": 1}]}
    volatile: dict[str, object] = {
        "torch_dtype": "bfloat16",
        "transformers_version": "9",
        "_name_or_path": "/elsewhere",
        "kinds": [{"dtype": "float16", "w": 1}],
        "text_config": {"dtype": "float32", "window": 8},
        "hidden_size": 4,
    }
    other: dict[str, object] = {**base, "text_config": {"window": 9}}
    first = fingerprint(write_model(tmp_path / "a", config=base))
    assert fingerprint(write_model(tmp_path / "b", config=volatile)) == first
    assert fingerprint(write_model(tmp_path / "c", config=other)) != first


def test_entries_give_absolute_ranges(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    entries = {entry.name: entry for entry in tensor_entries(model)}
    assert list(entries) == sorted(TENSORS)
    for name, (_, shape, raw) in TENSORS.items():
        entry = entries[name]
        assert entry.shape == tuple(shape)
        assert entry.file.read_bytes()[entry.start : entry.end] == raw


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    write_safetensors(model / "old.safetensors", {"b.weight": TENSORS["b.weight"]})
    with pytest.raises(Refused, match=r"'b.weight' twice, in model.safetensors and old"):
        fingerprint(model)


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no config\.json"):
        fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Refused, match=r"no \*\.safetensors"):
        fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refused, match="not JSON"):
        fingerprint(tmp_path)


def header_of(table: object, payload: bytes = b"") -> bytes:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw + payload


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "header of 0 bytes"),
        (b"\x01\x02", "in a file of 2"),
        (b"\xff" * 64, "header of"),
        ((200).to_bytes(8, "little") + b"{}", "header of 200 bytes"),
        (header_of(b"{nonsense"), "not JSON"),
        (header_of(b"\xff\xfe"), "not JSON"),
        (header_of([1]), "not a JSON object"),
        (header_of({"t": 3}), "lacks dtype"),
        (header_of({"t": {"dtype": "F32", "shape": [1]}}), "lacks dtype"),
        (header_of({"t": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"x"), "shape"),
        (header_of({"t": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"), "shape"),
        (header_of({"t": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, b"x"), "short"),
        (header_of({"t": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}, b"x"), "claims"),
        (header_of({"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1]}}, b"x"), "1 bytes"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(Refused, match=what) as refusal:
        read_header(file)
    assert refusal.value.field == "model"


def test_a_file_cut_short_after_its_header_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "m")
    monkeypatch.setattr("os.pread", lambda descriptor, nbytes, at: b"")
    with pytest.raises(Refused, match="0 bytes at"):
        fingerprint(model)
