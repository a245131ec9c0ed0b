"""The plan of the device check: its steps, how long each may take, and at what sizes they run.

All limits together stay below TOTAL_S. A step that has used its own is ended and what it wrote is
kept; one that no longer fits into the total is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["real", "fake"]

TOTAL_S: Final = 600.0
GRACE_S: Final = 5.0
"""How long a step has to end by itself once it is interrupted; then it is killed."""


@dataclass(frozen=True)
class Step:
    """One step: `module` of `headrace.bench.device.steps` does it within `limit_s`."""

    name: str
    module: str
    limit_s: float
    does: str


STEPS: Final = (
    Step("environment", "environment", 25, "device, driver, versions, limits, headrace doctor"),
    Step("models", "models", 45, "random models with layers of full size"),
    Step("check-cuda", "checks", 85, "headrace check --source cuda --decoder cuda"),
    Step("check-torch", "checks", 50, "headrace check --source torch --decoder cuda"),
    Step("exactness", "exactness", 105, "whole, chunked and streamed: equal to the last bit"),
    Step("link", "link", 35, "the link's own rate, pinned and pageable, and by chunk size"),
    Step("curve", "curve", 90, "0.1 to 4 GB of KV into device memory, by route"),
    Step("neighbours", "neighbours", 35, "token time of those who decode beside imports"),
    Step("trace", "trace", 25, "a streamed hand-off by the devices' clocks"),
    Step("ttft", "ttft", 35, "time to the first token, whole and streamed"),
    Step("plots", "plots", 10, "pictures of the rows"),
)

QUICK_CASES: Final = (
    "decoder-alone",
    "facts",
    "engine-alone",
    "exactness",
    "exactness-with-digests",
    "prefill-chunks",
    "two-at-once",
    "strays-are-dropped",
    "late-words",
    "cancel-while-streaming",
    "cancel-while-decoding",
    "cancel-at-every-turn",
    "slot-reuse",
    "parked-import",
    "cancel-when-sealed",
)
"""Of `headrace check --quick`; the others start many processes, each of which loads CUDA anew."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is. Sizes in GB (1e9 bytes) or MiB, prompts in tokens, rates in GB/s.

    full_size: whether the random models have layers of full size. small_models: built-in models,
    used where they were pulled before. exact_models: random ones; cpu_models: those that a CPU
    prefills too, a prompt of cpu_prompt. exact_prompt, beyond_window: of the exactness step, the
    second one added to the window. sweep_mib: moved for one figure. curve_routes: with pinned
    slabs; with pageable ones pageable_routes, up to pageable_gb. repeats_large: above 1 GB.
    judged_gb: where the import rate is judged. ttft_free_gb: device memory that must be free for
    the longest prompt.
    """

    full_size: bool
    dtype: str
    threads: int
    cases_cuda: tuple[str, ...]
    cases_torch: tuple[str, ...]
    small_models: tuple[str, ...]
    exact_models: tuple[str, ...]
    cpu_models: tuple[str, ...]
    exact_prompt: int
    beyond_window: int
    cpu_prompt: int
    link_repeats: int
    chunks_mib: tuple[int, ...]
    depths: tuple[int, ...]
    sweeps: int
    sweep_mib: int
    curve_gb: tuple[float, ...]
    curve_pace: float
    curve_routes: tuple[str, ...]
    pageable_routes: tuple[str, ...]
    pageable_gb: float
    repeats: int
    repeats_large: int
    fixed_repeats: int
    judged_gb: float
    neighbours: int
    import_prompt: int
    import_rate_mb_s: float
    blocks: int
    block_s: float
    trace_prompt: int
    ttft_prompts: tuple[int, ...]
    ttft_free_gb: float


REAL: Final = Sizes(
    full_size=True,
    dtype="bfloat16",
    threads=8,
    cases_cuda=QUICK_CASES,
    cases_torch=("facts", "exactness", "exactness-with-digests", "two-at-once", "slot-reuse"),
    small_models=("smollm2-135m", "gemma3-270m"),
    exact_models=("llama-3.1-8b", "qwen3-8b", "gemma-3-12b", "exaone-4.0-32b"),
    cpu_models=("llama-3.1-8b", "gemma-3-12b", "smollm2-135m"),
    exact_prompt=96,
    beyond_window=200,
    cpu_prompt=64,
    link_repeats=5,
    chunks_mib=(1, 2, 4, 8, 16, 32, 64),
    depths=(1, 2, 4, 8),
    sweeps=3,
    sweep_mib=256,
    curve_gb=(0.1, 0.256, 0.5, 1.0, 2.0, 4.0),
    curve_pace=4.0,
    curve_routes=("whole", "chunked-1024", "streamed-1", "streamed-4"),
    pageable_routes=("whole", "streamed-4"),
    pageable_gb=1.0,
    repeats=3,
    repeats_large=2,
    fixed_repeats=10,
    judged_gb=0.256,
    neighbours=2,
    import_prompt=2048,
    import_rate_mb_s=4000.0,
    blocks=6,
    block_s=0.5,
    trace_prompt=8192,
    ttft_prompts=(1024, 8192, 32768),
    ttft_free_gb=24.0,
)

FAKE: Final = Sizes(
    full_size=False,
    dtype="float32",
    threads=1,
    cases_cuda=("facts", "exactness-with-digests", "cancel-at-every-turn"),
    cases_torch=("facts", "cancel-at-every-turn"),
    small_models=(),
    exact_models=("gemma-3-12b", "exaone-4.0-32b"),
    cpu_models=("gemma-3-12b",),
    exact_prompt=20,
    beyond_window=8,
    cpu_prompt=12,
    link_repeats=2,
    chunks_mib=(1, 2),
    depths=(1, 2),
    sweeps=1,
    sweep_mib=4,
    curve_gb=(0.002,),
    curve_pace=0.01,
    curve_routes=("whole", "chunked-8", "streamed-4"),
    pageable_routes=("whole", "streamed-4"),
    pageable_gb=0.002,
    repeats=2,
    repeats_large=2,
    fixed_repeats=3,
    judged_gb=0.002,
    neighbours=1,
    import_prompt=32,
    import_rate_mb_s=1.0,
    blocks=2,
    block_s=0.1,
    trace_prompt=64,
    ttft_prompts=(24,),
    ttft_free_gb=0.0,
)

SIZES: Final[dict[Kind, Sizes]] = {"real": REAL, "fake": FAKE}


def step_of(name: str) -> Step:
    """The step of this name; a KeyError is this program's own mistake."""
    return {step.name: step for step in STEPS}[name]
