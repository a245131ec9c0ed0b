"""A vLLM source feeds this project's own cpu decoder, in the project's own Python.

The routes have the same tokens, and these are what a torch source gives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import ROOT, directory_of

PAIR = """
import json, random, sys
from headrace.backends.load import open_decoder
from headrace.runtime.owner import DecoderOwner
from headrace.runtime.requests import RequestOptions
from headrace.runtime.worker import SourceHandle

model, chunk, python = sys.argv[1], int(sys.argv[2]), sys.argv[3]
draw = random.Random(1)
prompts = [[draw.randrange(3, 250) for _ in range(count)] for count in (1, 31, 64, 300)]
told = []
for source in ("vllm", "torch"):
    decoder = open_decoder("cpu", {"model": model, "context": 512})
    owner = DecoderOwner(decoder, context=512)
    options = {"model": model, "max_positions": 512}
    if source == "vllm":
        options |= {"prefill_chunk": chunk, "engine": {"skip_tokenizer_init": True}}
    handle = SourceHandle(source, options, interpreter=python if source == "vllm" else None)
    handle.start()
    owner.attach(handle)
    for prompt in prompts:
        for route in ("whole", "chunked", "streamed") if source == "vllm" else ("whole",):
            asked = RequestOptions(route=route, max_tokens=12, prefill_chunk=chunk)
            request = owner.submit(prompt, asked)
            owner.run_until_done(request)
            assert request.outcome == "finished", request.reason
            early = request.measured.nbytes_before_final
            told.append([source, len(prompt), route, request.tokens, early])
    owner.close()
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("tiny-exaone4", 64), ("smollm2-135m", 128), ("gemma3-270m", 0)],
)
def test_routes_have_the_tokens_of_a_torch_source(
    tiny: Path, torch_python: str, name: str, chunk: int
) -> None:
    command = [torch_python, "-c", PAIR, str(directory_of(name, tiny)), str(chunk), sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    told: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    right = {count: tokens for source, count, _, tokens, _ in told if source == "torch"}
    got = [each for each in told if each[0] == "vllm"]
    assert len(got) == 3 * len(right)
    for _, count, route, tokens, early in got:
        assert tokens == right[count], (count, route)
        assert early > 0 or route == "whole" or (route == "chunked" and count <= (chunk or 512))
