"""The directory of a compiled model: what names it, and what its metadata says of its caches.

Nothing of the vendor's is needed to read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec

from headrace.engine.atom.caches import Cache, read_caches
from headrace.engine.checkpoint import BLOCK_NBYTES
from headrace.errors import Refused

CONFIG_NAME: Final = "rbln_config.json"
SAMPLED_EVERY: Final = 2 << 20
"""Bytes of a large file from one sample to the next."""

_SMALL_NBYTES: Final = 2 << 20
_META: Final = ("name", "layer_index", "shape", "dtype", "layer_type")


class Geometry(NamedTuple):
    """What a model was compiled for. positions: of its graphs, as far as it has blocks for them."""

    caches: tuple[Cache, ...]
    positions: int


def digest_of(directory: Path) -> str:
    """Name a compiled model by its metadata, and by the sizes, times and samples of its files.

    A file that is written anew, or only touched, makes another name and costs one more probe:
    samples alone would not tell two files that differ in a layer.

    Raises:
        Refused: the directory holds none, or cannot be read.
    """
    _require(directory)
    digest = hashlib.sha256()
    try:
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            stat = path.stat()
            name = path.relative_to(directory).as_posix()
            digest.update(msgspec.json.encode([name, stat.st_size, stat.st_mtime_ns]))
            with path.open("rb") as file:
                if name == CONFIG_NAME:
                    digest.update(file.read())
                    continue
                for start in _samples(stat.st_size):
                    file.seek(start)
                    digest.update(file.read(BLOCK_NBYTES))
    except OSError as exc:
        raise _unreadable(directory, str(exc)) from exc
    return f"sha256:{digest.hexdigest()}"


def read_geometry(directory: Path) -> Geometry:
    """What a compiled model's metadata says, without loading it.

    Raises:
        Refused: the directory holds none, or its metadata is of another form.
        BackendUnavailable: api_missing: the caches are described otherwise than is known.
    """
    _require(directory)
    try:
        told: dict[str, Any] = json.loads((directory / CONFIG_NAME).read_bytes())
        _require_decoder(directory, told)
        metas = [
            SimpleNamespace(**{name: meta[name] for name in _META}) for meta in told["cache_metas"]
        ]
        positions = int(told["max_seq_len"])
        blocks = int(told.get("kvcache_num_blocks") or 0)
        num_devices = int(told.get("num_devices") or told.get("tensor_parallel_size") or 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _unreadable(directory / CONFIG_NAME, f"{type(exc).__name__}: {exc}") from exc
    if num_devices > 1:
        raise Refused(
            f"{directory} was compiled for {num_devices} cards, and one is supported; compile it "
            "with rbln_num_devices=1",
            field="compiled",
        )
    caches = read_caches(metas)
    rows = [each.rows for each in caches if each.kind == "full"]
    # Fewer blocks than the longest sequence has may have fitted onto the card.
    room = blocks * rows[0] if blocks and rows else positions
    return Geometry(caches, min(positions, room))


def _require_decoder(directory: Path, told: dict[str, Any]) -> None:
    """Raises: Refused: the decoder is a part of what was compiled."""
    if "cache_metas" in told:
        return
    parts = [
        name for name, each in told.items() if isinstance(each, dict) and "cache_metas" in each
    ]
    if parts:
        raise Refused(
            f"{directory} holds a {str(told.get('cls_name')).removesuffix('Config')} whose decoder "
            f"is its part {parts[0]}, which is not supported; compile the text model alone, with "
            "RBLNAutoModelForCausalLM",
            field="compiled",
        )


def _samples(nbytes: int) -> Iterator[int]:
    """Where blocks are read of a file: each so many bytes, and the last; all of a small one."""
    yield from range(0, nbytes, BLOCK_NBYTES if nbytes <= _SMALL_NBYTES else SAMPLED_EVERY)
    yield max(0, nbytes - BLOCK_NBYTES)


def _require(directory: Path) -> None:
    if not (directory / CONFIG_NAME).is_file():
        raise Refused(
            f"{directory} holds no {CONFIG_NAME}; name the directory that optimum-rbln compiled "
            "the model into",
            field="compiled",
        )


def _unreadable(path: Path, why: str) -> Refused:
    return Refused(f"{path} cannot be read: {why}", field="compiled")
