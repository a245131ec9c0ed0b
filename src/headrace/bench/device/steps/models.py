"""Makes the random models that the steps after it use; they are removed at the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Final

from headrace.bench.device.models import MODELS, make_model
from headrace.bench.device.place import Place
from headrace.errors import HeadraceError, Refused

_NEEDED_NBYTES: Final = 8_000_000_000


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """One row for each model. Raises: Refused if the disk is too full, or none can be made."""
    full_size = place.sizes.full_size
    free = shutil.disk_usage(place.folder).free
    if full_size and free < _NEEDED_NBYTES:
        raise Refused(
            f"{place.folder} has {free / 1e9:.1f} GB left and the models take "
            f"{_NEEDED_NBYTES / 1e9:.0f}; name a folder on another disk"
        )
    file = place.rows(step)
    on = "cuda:0" if place.kind == "real" else "cpu"
    made = 0
    for name in MODELS:
        place.model(name).parent.mkdir(exist_ok=True)
        row = {"measure": "model", "model": name, "full_size": full_size}
        try:
            numbers = make_model(name, place.model(name), full_size=full_size, torch_device=on)
        except HeadraceError as exc:
            file.append({**row, "skipped": str(exc)})
            say(f"{name}: {exc}")
            continue
        made += 1
        file.append({**row, "parameters": numbers})
        say(f"{name}: {numbers} parameters")
    if not made:
        raise Refused("none of the models can be made")
