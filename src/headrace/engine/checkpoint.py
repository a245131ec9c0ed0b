"""The fingerprint of a model directory: do source and decoder hold the same weights?

Both sides publish it in their manifests, and a pairing with two different fingerprints is refused.
It covers the configuration and every tensor's name, dtype and shape, and samples of every tensor's
bytes, so that two finetunes of one model differ while a directory of several gigabytes still takes
well under a second. It does not cover what changes between two copies of the same model: the file
names and the order of shards, the dtype an engine loads with, the library version that wrote the
files. It finds mistakes; it is no defence against a directory made to collide.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import Refused

BLOCK_NBYTES = 4096
INNER_BLOCKS = 16
MAX_HEADER_NBYTES = 100_000_000  # the limit of the format's own reader

VOLATILE_CONFIG_KEYS = frozenset(
    {
        "transformers_version",
        "torch_dtype",
        "dtype",
        "_name_or_path",
        "_model_name_or_path",
        "_attn_implementation",
        "_commit_hash",
    }
)

_ITEM_NBYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `[start, end)` of `file`, counted from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


def fingerprint(directory: Path) -> str:
    """Name the model in `directory` by its configuration and samples of its weights.

    Returns `"sha256:"` and 64 hexadecimal digits.

    Raises:
        Refused: the directory holds no model, or a file in it is not what its name says.
    """
    digest = hashlib.sha256(_canonical_config(directory / "config.json"))
    entries = tensor_entries(directory)
    descriptors: dict[Path, int] = {}
    try:
        for entry in entries:
            if entry.file not in descriptors:
                descriptors[entry.file] = os.open(entry.file, os.O_RDONLY)
            # The JSON list delimits the fields: no name can run into a shape.
            digest.update(json.dumps([entry.name, entry.dtype, entry.shape]).encode())
            for start, end in sampled(entry.start, entry.end):
                digest.update(_read_exactly(descriptors[entry.file], start, end, entry.file))
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return f"sha256:{digest.hexdigest()}"


def tensor_entries(directory: Path) -> list[TensorEntry]:
    """List all tensors of the directory's safetensors files, sorted by name.

    Raises:
        Refused: there is no such file, a header is malformed, or two files hold the same tensor.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise Refused(f"{directory} holds no *.safetensors file", field="model")
    by_name: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            other = by_name.setdefault(entry.name, entry)
            if other is not entry:
                raise Refused(
                    f"{directory} holds tensor {entry.name!r} twice, in {other.file.name} and "
                    f"{file.name}: remove the weights that do not belong to the model",
                    field="model",
                )
    return [by_name[name] for name in sorted(by_name)]


def read_header(file: Path) -> list[TensorEntry]:
    """Read the tensor table at the front of a safetensors file.

    Raises:
        Refused: the file is no safetensors file, or is cut short.
    """
    file_nbytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_nbytes = int.from_bytes(prefix, "little")
        payload_start = 8 + header_nbytes
        if len(prefix) < 8 or header_nbytes > MAX_HEADER_NBYTES or payload_start > file_nbytes:
            raise _malformed(file, f"header of {header_nbytes} bytes in a file of {file_nbytes}")
        raw = stream.read(header_nbytes)
    try:
        table = json.loads(raw)
    except ValueError as exc:  # covers both bad UTF-8 and bad JSON
        raise _malformed(file, f"the header is not JSON ({exc})") from exc
    if not isinstance(table, dict):
        raise _malformed(file, "the header is not a JSON object")
    return [
        _entry(file, name, facts, payload_start, file_nbytes)
        for name, facts in table.items()
        if name != "__metadata__"
    ]


def _entry(
    file: Path, name: str, facts: object, payload_start: int, file_nbytes: int
) -> TensorEntry:
    match facts:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise _malformed(file, f"tensor {name!r} lacks dtype, shape or data_offsets")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise _malformed(file, f"tensor {name!r} has shape {shape}")
    if not 0 <= start <= end <= file_nbytes - payload_start:
        raise _malformed(
            file,
            f"tensor {name!r} claims bytes [{start}, {end}) of {file_nbytes - payload_start}: "
            "the file may be cut short",
        )
    # A dtype unknown here may pack several items into a byte, so only its range is checked.
    item_nbytes = _ITEM_NBYTES.get(dtype)
    if item_nbytes is not None and math.prod(shape) * item_nbytes != end - start:
        raise _malformed(file, f"tensor {name!r} is {dtype}{shape} but has {end - start} bytes")
    return TensorEntry(name, dtype, tuple(shape), file, payload_start + start, payload_start + end)


def sampled(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges to hash: first, evenly spaced and last block, or all of a small tensor."""
    nbytes = end - start
    if nbytes <= BLOCK_NBYTES * (INNER_BLOCKS + 2):
        yield start, end
        return
    stride = (nbytes - BLOCK_NBYTES) / (INNER_BLOCKS + 1)
    for index in range(INNER_BLOCKS + 2):
        at = start + int(index * stride)
        yield at, at + BLOCK_NBYTES


def _read_exactly(descriptor: int, start: int, end: int, file: Path) -> bytes:
    block = os.pread(descriptor, end - start, start)
    if len(block) != end - start:
        raise _malformed(file, f"{len(block)} bytes at {start}, expected {end - start}")
    return block


def _canonical_config(path: Path) -> bytes:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as exc:
        raise Refused(f"{path.parent} holds no config.json", field="model") from exc
    except ValueError as exc:
        raise Refused(f"{path} is not JSON: {exc}", field="model") from exc
    return json.dumps(_stable(config), sort_keys=True, separators=(",", ":")).encode()


def _stable(value: object) -> object:
    """Drop volatile keys at every depth: a multimodal config repeats them in its sub-configs."""
    match value:
        case dict():
            return {k: _stable(v) for k, v in value.items() if k not in VOLATILE_CONFIG_KEYS}
        case list():
            return [_stable(item) for item in value]
        case _:
            return value


def _malformed(file: Path, detail: str) -> Refused:
    return Refused(f"{file} is not a readable safetensors file: {detail}", field="model")
