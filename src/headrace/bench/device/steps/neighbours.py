"""Token time of those who decode on the GPU while others are imported: `headrace.bench.load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.bench import load
from headrace.bench.device.models import MEASURED
from headrace.bench.device.place import Place
from headrace.errors import Refused


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """Rows of `token` as `headrace bench load` has them. Raises: Refused without the model."""
    sizes, directory = place.sizes, place.model(MEASURED)
    if not directory.is_dir():
        raise Refused(f"the model {MEASURED} was not made")
    setting = load.Setting(
        model=MEASURED,
        directory=directory,
        rates_mb_s=(sizes.import_rate_mb_s,),
        in_flight=(),
        neighbours=(sizes.neighbours,),
        import_prompt=sizes.import_prompt,
        blocks=sizes.blocks,
        block_s=sizes.block_s,
        decoder=place.decoder,
        dtype=sizes.dtype,
    )
    setting.check()
    for row in load.run(setting, place.rows(step)):
        say(_told(row))


def _told(row: dict[str, Any]) -> str:
    gaps = row["gaps_ns"]
    return (
        f"block {row['block']}, {row['arm']} {row['route'] or ''}: {len(gaps)} tokens, "
        f"{sum(gaps) / len(gaps) / 1e6:.3f} ms each, {row['requests']} imported"
    )
