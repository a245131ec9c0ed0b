"""The directory of a compiled model: what names it, and what its metadata says of its caches.

Nothing of the vendor's is needed to read it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec

from headrace.engine.atom.caches import Cache, read_caches
from headrace.engine.checkpoint import sampled
from headrace.errors import Refused

CONFIG_NAME: Final = "rbln_config.json"
_META: Final = ("name", "layer_index", "shape", "dtype", "layer_type")


class Geometry(NamedTuple):
    """What a model was compiled for. positions: of its graphs."""

    caches: tuple[Cache, ...]
    positions: int


def digest_of(directory: Path) -> str:
    """Name a compiled model by its metadata, and by the sizes and samples of its other files.

    Raises:
        Refused: the directory holds none, or cannot be read.
    """
    _require(directory)
    digest = hashlib.sha256()
    try:
        for path in sorted(each for each in directory.rglob("*") if each.is_file()):
            nbytes = path.stat().st_size
            name = path.relative_to(directory).as_posix()
            digest.update(msgspec.json.encode([name, nbytes]))
            with path.open("rb") as file:
                if name == CONFIG_NAME:
                    digest.update(file.read())
                    continue
                for start, stop in sampled(0, nbytes):
                    file.seek(start)
                    digest.update(file.read(stop - start))
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
        metas = [
            SimpleNamespace(**{name: meta[name] for name in _META}) for meta in told["cache_metas"]
        ]
        positions = int(told["max_seq_len"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise _unreadable(directory / CONFIG_NAME, f"{type(exc).__name__}: {exc}") from exc
    return Geometry(read_caches(metas), positions)


def _require(directory: Path) -> None:
    if not (directory / CONFIG_NAME).is_file():
        raise Refused(
            f"{directory} holds no {CONFIG_NAME}; name the directory that optimum-rbln compiled "
            "the model into",
            field="compiled",
        )


def _unreadable(path: Path, why: str) -> Refused:
    return Refused(f"{path} cannot be read: {why}", field="compiled")
