"""Whether engines would take their options, as far as that is known without loading a model.

Engines need torch and more, which a server process has no other use for: this is run by the child
that measures (see `headrace.server.sizes`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

from headrace.backends.load import find_factory
from headrace.backends.null import decoder_like
from headrace.backends.options import read_options
from headrace.backends.replay import open as open_replay
from headrace.errors import BackendUnavailable, HeadraceError, Refused
from headrace.geometry import Manifest
from headrace.runtime.pairs import NULL

OPTIONS: Final = ("Options", "ReplayOptions", "NullOptions")
CUDA: Final = "cuda"


def check_engine(role: str, name: str, options: Mapping[str, Any], place: str, *, own: bool) -> Any:
    """Refuse options that an engine does not take, and an engine that is not there.

    role: `source` or `decoder`. place: where its table stands. own: whether it runs in this
    interpreter's environment; what is another's is not looked at. Returns the options as read, or
    None where they are its factory's own.

    Raises:
        Refused: naming the place; also where it has no device here.
    """
    if ":" in name:
        if own:
            _check_factory(role, name, f"{place}.{role}")
        return None
    if name == NULL:
        options = {"manifest": decoder_like(replayed_manifest({})), **options}
    module = sys.modules[find_factory(role, name).__module__]
    kind = next(getattr(module, each) for each in OPTIONS if hasattr(module, each))
    try:
        read = read_options(options, kind, name)
    except Refused as exc:
        said = str(exc).partition(": ")[2]
        raise Refused(f"{place}.options: {said}", field="options") from exc
    if name == CUDA and own:
        from headrace.engine.cuda import check_device

        try:
            check_device(read.device)
        except BackendUnavailable as exc:
            raise Refused(f"{place}: {exc}", field=role) from exc
    return read


def replayed_manifest(options: Mapping[str, Any]) -> Manifest:
    """What a replay source tells of the cache that it makes."""
    return open_replay(options).manifest()


def _check_factory(role: str, name: str, place: str) -> None:
    try:
        find_factory(role, name)
    except HeadraceError as exc:
        raise Refused(f"{place}: {exc}", field=role) from exc
    except Exception as exc:  # it is somebody's code, which may raise anything
        raise Refused(f"{place}: {name!r} cannot be imported: {exc!r}", field=role) from exc
