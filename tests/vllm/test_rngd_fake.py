"""The RNGD source feeds vLLM, on a fake of the vendor's packages that computes near to its kernels.

What is exact is the route; the numbers are bf16's, by another order of operations than vLLM's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.vllm.conftest import ROOT
from tests.vllm.engines import engine_of, prompt_of
from tests.vllm.seen import same

BOUND = 0.1
"""Of the rms difference, as a share of the rms of what vLLM computes."""

MAKE = """
import sys
from pathlib import Path
from tests.unit.engine.rngd.small_kernels import write_checkpoint
write_checkpoint(Path(sys.argv[1]), hidden_size=128, num_hidden_layers=3)
"""


def test_routes_are_equal_and_near_to_what_vllm_computes(torch_python: str, tmp_path: Path) -> None:
    model = tmp_path / "llama"
    make = [torch_python, "-c", MAKE, str(model)]
    subprocess.run(make, check=True, cwd=ROOT, stdout=sys.stderr)
    options = {
        "sdk": "headrace.testing.fake_furiosa:open",
        "emulate": True,
        "token_buckets": [32, 64],
        "max_positions": 192,
        "compile_cache": str(tmp_path),
    }
    source = {"source": "rngd", "python": torch_python, "options": options}
    with engine_of(model, [source], dtype="bfloat16", max_model_len=256) as engine:
        for num_tokens in (33, 70, 150):
            prompt = prompt_of(num_tokens, vocab=50)
            computed = engine.computed(engine.generate(prompt, route=None))
            got = [engine.generate(prompt, route=each) for each in ("whole", "chunked", "streamed")]
            rows = [engine.imported(each) for each in got]
            assert all(each.cached == got[0].end for each in got)
            assert all(each.tokens == got[0].tokens for each in got)
            assert all(same(each, rows[0]) for each in rows)
            for key, theirs in computed.items():
                apart = (rows[0][key].float() - theirs.float()).square().mean().sqrt()
                assert apart < BOUND * theirs.float().square().mean().sqrt(), key
        assert engine.num_free == engine.all_free
