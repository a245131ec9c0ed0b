"""While nothing is computed and a load is under way, vLLM's steps rest, and its end wakes them."""

from __future__ import annotations

import time
from pathlib import Path

from tests.vllm.engines import engine_of, prompt_of
from tests.vllm.stations import replay_of, stand_at, station

REST_S = 1.0
LOADS = 8


def test_steps_rest_and_are_woken(tiny: Path, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    source = replay_of(tiny / "tiny-llama", tmp_path)
    extra = {"idle_wait_ms": REST_S * 1e3}
    with engine_of(tiny / "tiny-llama", [source], extra=extra) as engine:
        engine.generate(prompt)
        with station(tmp_path, prompt) as here:
            asked = engine.ask(prompt)
            stand_at(engine, here, "commit 2")
            engine.step()
            begun_s, cpu_s = time.monotonic(), time.process_time()
            for _ in range(3):
                engine.step()
            took_s = time.monotonic() - begun_s
            assert took_s > 2.9 * REST_S
            assert time.process_time() - cpu_s < 0.2 * took_s
            here.open()
            engine.run(asked)
        begun_s = time.monotonic()
        for _ in range(LOADS):
            engine.generate(prompt)
        assert time.monotonic() - begun_s < LOADS * REST_S / 2
