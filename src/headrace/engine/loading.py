"""Loading a transformers model from a local directory, and running one forward of it.

What changes a result although the weights are the same (threads, dtype, attention implementation,
library versions) is fixed here and told as *pairing facts*, which every measurement is stamped
with.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engine.tensors import DTYPES
from headrace.errors import LocalProtocolError, Refused


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready to run, and the facts that its results depend on.

    module: the transformers model. config: its text decoder's configuration. attention: the
    implementation in use. cache_argument: what this transformers version calls the cache.
    """

    module: Any
    config: Any
    directory: Path
    dtype: str
    device: str
    threads: int
    attention: str
    cache_argument: str

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """The most positions that the model was made for."""
        return int(self.config.max_position_embeddings)

    def pairing_facts(self, cache_class: str) -> dict[str, str | int]:
        """What must be the same for two results to be comparable bit by bit."""
        return {
            "threads": self.threads,
            "attention": self.attention,
            "cache_class": cache_class,
            "torch": str(torch.__version__),
            "transformers": str(transformers.__version__),
            "dtype": self.dtype,
            "device": self.device,
        }

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check that every id is in the vocabulary: the embedding would only say "index error".

        Raises:
            LocalProtocolError: there is no token, or one is unknown.
        """
        if len(tokens) == 0:
            raise LocalProtocolError("no tokens to compute")
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocab_size:
            raise LocalProtocolError(
                f"token ids in [{low}, {high}], the vocabulary is [0, {self.vocab_size})"
            )

    def forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Run `ids` [1, t] on top of `cache`; returns the last position's float32 logits on the
        host.
        """
        return self.forward_logits(ids, cache).to("cpu")

    def forward_logits(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """Like `forward`, but the logits stay where the model is, queued there like all before."""
        with torch.inference_mode():
            output = self.module(
                input_ids=ids, use_cache=True, logits_to_keep=1, **{self.cache_argument: cache}
            )
            logits: torch.Tensor = output.logits[0, -1]
            return logits.to(torch.float32).contiguous()


def load_model(
    directory: Path,
    *,
    dtype: str = "float32",
    threads: int = 1,
    attention: str | None = None,
    device: str = "cpu",
) -> LoadedModel:
    """Load the model in `directory` (config.json and safetensors); nothing is downloaded.

    `attention` None takes sdpa where the model has it and eager where it has not. `threads` sets
    torch's threads for the whole process.

    Raises:
        Refused: there is no such model, or it cannot be loaded as asked.
    """
    if dtype not in DTYPES:
        raise Refused(f"dtype {dtype!r} is unknown; use one of {sorted(DTYPES)}", field="dtype")
    if threads < 1:
        raise Refused(f"threads is {threads}; give at least 1", field="threads")
    if not (directory / "config.json").is_file():
        raise Refused(f"{directory} holds no config.json", field="model")
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        module = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            local_files_only=True,
        )
    except ImportError as exc:  # 8 bit weights are read with a package that others do not need
        told = " ".join(str(exc).split())
        raise Refused(
            f"{directory} needs one more package to load ({told}); for FP8 checkpoints run "
            "pip install 'headrace[fp8]'",
            field="model",
        ) from exc
    except (OSError, ValueError, KeyError) as exc:
        raise Refused(f"{directory} does not load as a causal model: {exc}", field="model") from exc
    try:
        module.eval().requires_grad_(False).to(device)
    except (RuntimeError, AssertionError) as exc:  # how torch says that there is no such device
        raise Refused(f"torch cannot use device {device!r}: {exc}", field="device") from exc
    return LoadedModel(
        module=module,
        config=module.config.get_text_config(decoder=True),
        directory=directory,
        dtype=dtype,
        device=device,
        threads=threads,
        attention=str(module.config._attn_implementation),
        cache_argument=_cache_argument(module),
    )


def load_config(directory: Path) -> Any:
    """The text decoder's configuration of the model in `directory`, without its weights.

    Raises:
        Refused: there is none that this transformers version knows.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise Refused(f"{directory} has no usable config.json: {exc}", field="model") from exc
    return config.get_text_config(decoder=True)


def _cache_argument(module: Any) -> str:
    parameters = inspect.signature(module.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise Refused(f"{type(module).__name__}.forward takes no cache", field="model")
