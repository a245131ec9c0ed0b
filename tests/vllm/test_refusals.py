"""What cannot work is refused when vLLM starts, in one sentence that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import ROOT
from tests.vllm.engines import engine_of, nothing_left, prompt_of
from tests.vllm.stations import replay_of

REPLAY = {"source": "replay"}
GOOD: dict[str, Any] = {"sources": [REPLAY]}
STRANGER = {"layers": 4, "heads": 2, "head_dim": 32, "dtype": "float32", "vocab_size": 256}
NARROW = {**STRANGER, "head_dim": 16}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unknown field `rout`; its keys are sources, load, ": ({**GOOD, "rout": "whole"}, {}),
    "missing required field `sources`": ({}, {}),
    "give it from 1 to": ({"sources": []}, {}),
    "Invalid enum value 'sideways'": ({**GOOD, "route": "sideways"}, {}),
    "/no/such/place is not a directory": ({**GOOD, "trace_dir": "/no/such/place"}, {}),
    "run the decoder with kv_role kv_consumer and a source": (GOOD, {"role": "kv_producer"}),
    "this is vLLM 0.31.2, and headrace's connector was made for": (GOOD, {"version": "0.31.2"}),
    "head_dim": ({"sources": [{**REPLAY, "options": NARROW}]}, {}),
    "model: source ": ({"sources": [{**REPLAY, "options": STRANGER}]}, {}),
    "unknown source 'nothing'": ({"sources": [{"source": "nothing"}]}, {}),
    "/no/python": ({"sources": [{**REPLAY, "python": "/no/python"}]}, {}),
}
"""What is said, of which `kv_connector_extra_config` and what else."""

STARTS = """
import json, sys
import vllm
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from headrace.errors import HeadraceError

version = vllm.__version__
for extra, more in json.loads(sys.argv[2]):
    vllm.__version__ = more.get("version", version)
    try:
        vllm.LLM(
            model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=1024,
            block_size=32, skip_tokenizer_init=True, disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "HeadraceConnector",
                "kv_connector_module_path": "headrace.vllm",
                "kv_role": more.get("role", "kv_consumer"),
                "kv_connector_extra_config": extra,
            },
        )
        print("SAID", json.dumps("nothing: it started"))
    except HeadraceError as exc:
        print("SAID", json.dumps(str(exc)))
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
"""


def test_what_is_wrong_is_said_in_one_sentence(tiny: Path) -> None:
    given = json.dumps(list(CASES.values()))
    with nothing_left():
        done = subprocess.run(
            [sys.executable, "-c", STARTS, str(tiny / "tiny-llama"), given],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    lines = [line.removeprefix("SAID ") for line in done.stdout.splitlines() if "SAID" in line]
    assert len(lines) == len(CASES), done.stderr[-3000:]
    for sentence, said in zip(CASES, map(json.loads, lines), strict=True):
        assert sentence in said
        assert "\n" not in said


def test_a_second_engine_in_one_process_is_refused(tiny: Path, tmp_path: Path) -> None:
    """vLLM would give it the connector of the first, which would write the wrong blocks."""
    from headrace.errors import Refused

    model = tiny / "tiny-llama"
    source = replay_of(model, tmp_path)
    with engine_of(model, [source]) as first:
        right = first.generate(prompt_of(100))
        assert right.cached == 96
        with pytest.raises(Refused, match="has headrace's connector already"):
            first.second(model, [source])
    with engine_of(model, [source]) as again:
        assert again.generate(prompt_of(100)).tokens == right.tokens
