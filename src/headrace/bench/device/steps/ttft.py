"""Time to the first token from the GPU to the GPU, whole and streamed, by prompt length.

The model has a few layers of full size, so compute and transfer of a layer are in proportion to
each other as in the model that it is named after; the time of a whole model is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from headrace.bench.device.models import MEASURED
from headrace.bench.device.place import Place
from headrace.bench.families import random_prompt
from headrace.bench.stand import Stand
from headrace.bench.ttft import measured_of
from headrace.bench.ttft_points import MARGIN
from headrace.errors import DeviceError, Refused
from headrace.messages import AskedRoute
from headrace.runtime.requests import RequestOptions

ROUTES: Final[tuple[AskedRoute, ...]] = ("whole", "streamed")


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """A row for each prompt, repeat and route. Raises: Refused without the model."""
    directory = place.model(MEASURED)
    if not directory.is_dir():
        raise Refused(f"the model {MEASURED} was not made")
    file = place.rows(step)
    for num_tokens in place.sizes.ttft_prompts:
        same = {"measure": "ttft", "model": MEASURED, "prompt_tokens": num_tokens}
        short = _too_little(place, num_tokens)
        if short:
            file.append({**same, "skipped": short})
            say(f"{num_tokens} tokens: {short}")
            continue
        try:
            for row in _measured(place, num_tokens):
                file.append({**same, **row})
        except (Refused, DeviceError) as exc:  # a longer prompt may not fit; the others stand
            file.append({**same, "skipped": str(exc)})
            say(f"{num_tokens} tokens: {exc}")
            continue
        say(f"{num_tokens} tokens: done")


def _measured(place: Place, num_tokens: int) -> Iterator[dict[str, Any]]:
    with place.stand(place.model(MEASURED), num_tokens + MARGIN) as stand:
        prompt = random_prompt(num_tokens, stand.decoder.manifest().vocab_size)
        for route in ROUTES:
            _serve(stand, prompt, route)
        for repeat in range(place.sizes.repeats):
            for route in ROUTES if repeat % 2 == 0 else reversed(ROUTES):
                row = _serve(stand, prompt, route)
                yield {"route": route, "repeat": repeat, **row, "pairing": stand.facts}


def _serve(stand: Stand, prompt: list[int], route: AskedRoute) -> dict[str, int]:
    return measured_of(stand.serve(prompt, RequestOptions(route=route, max_tokens=1)))


def _too_little(place: Place, num_tokens: int) -> str:
    """Why the longest prompt is left out, if it is: two processes hold the model and its cache."""
    if place.kind == "fake" or num_tokens < max(place.sizes.ttft_prompts):
        return ""
    import torch

    free = torch.cuda.mem_get_info(0)[0] / 1e9
    if free >= place.sizes.ttft_free_gb:
        return ""
    return f"{free:.1f} GB of device memory are free and {place.sizes.ttft_free_gb:g} are asked for"
