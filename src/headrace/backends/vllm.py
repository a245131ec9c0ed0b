"""The vLLM prefill engine: a vLLM engine in the source process, taken layer by layer.

vLLM loads headrace's connector as a producer, and that tells each layer's writes while the forward
runs (`headrace.engine.vllm.producing`). One prompt is computed at a time, by chunks of the length
that the source was started with, since vLLM knows no other for a prompt that runs alone. It samples
the first token itself and gives no row of logits, so that the manifest says `first: token`, by the
highest logit.

A cancel is looked for at each layer and takes effect at the end of the chunk that is being
computed, since vLLM's forward cannot be left midway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from headrace.backends.asked import check_asked
from headrace.backends.base import PrefillSink
from headrace.backends.options import read_options
from headrace.backends.takers import taker_of
from headrace.engine.pieces import pieces
from headrace.engine.vllm.producing import HERE
from headrace.engine.vllm.versions import check_version
from headrace.errors import Closed, LocalProtocolError, Refused
from headrace.geometry import ITEMSIZE, Layer, Manifest, Sliding

ROLE: Final = "HEADRACE_VLLM_SOURCE"
"""A variable that tells the connector that it is loaded in a source."""


class Options(Struct, frozen=True, forbid_unknown_fields=True):
    """What `open` takes.

    model: a directory that vLLM loads. max_positions: the longest prompt, by default the model's
    longest. prefill_chunk: positions that are computed at once, 0 = all; requests must ask for the
    same. block_size: of vLLM's cache, None for its own choice. engine: further arguments of
    vLLM's `LLM`, by their names there.
    """

    model: str
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1)] = 1
    max_positions: Annotated[int, Meta(ge=1)] | None = None
    prefill_chunk: Annotated[int, Meta(ge=0)] = 0
    block_size: Annotated[int, Meta(ge=1)] | None = None
    engine: dict[str, Any] = {}


_OURS: Final = (
    *("model", "dtype", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"),
    *("hf_overrides", "hf_config_path", "quantization", "load_format", "revision"),
    *("enable_prefix_caching", "kv_transfer_config", "tensor_parallel_size"),
)

_HEADS: Final = ("num_key_value_heads", "num_global_key_value_heads")
_HEAD_DIMS: Final = ("head_dim", "global_head_dim")
_SPARE_POSITIONS: Final = 1024  # what vLLM's blocks are rounded up by, and its null block


def open(config: Mapping[str, Any]) -> VllmEngine:
    """Load the engine from the fields of `Options`.

    Raises:
        Refused: an option is unknown or wrong, or the model's cache is not supported.
    """
    options = read_options(config, Options, "vllm")
    taken = sorted(set(options.engine) & set(_OURS))
    if taken:
        raise Refused(f"engine sets {', '.join(taken)}, which the source sets", field="engine")
    os.environ[ROLE] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the sink is in this process
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    import vllm

    check_version(vllm.__version__)
    torch.set_num_threads(options.threads)
    return VllmEngine(_load(options), options)


def _load(options: Options) -> Any:
    from vllm import LLM
    from vllm.transformers_utils.config import get_config

    config = get_config(options.model, trust_remote_code=False).get_text_config()
    positions = options.max_positions or int(config.max_position_embeddings)
    longest = positions + 1  # vLLM wants room for the token that it samples
    given = {
        "enforce_eager": True,
        "use_tqdm_on_load": False,
        "kv_cache_memory_bytes": _cache_nbytes(config, longest, options.dtype),
        **options.engine,
    }
    if options.block_size is not None:
        given["block_size"] = options.block_size
    try:
        return LLM(
            model=options.model,
            dtype=options.dtype,
            max_model_len=min(longest, int(config.max_position_embeddings)),
            max_num_batched_tokens=options.prefill_chunk or longest,
            max_num_seqs=1,
            enable_prefix_caching=False,  # what is not computed is not told
            kv_transfer_config={
                "kv_connector": "HeadraceConnector",
                "kv_connector_module_path": "headrace.vllm",
                "kv_role": "kv_producer",
            },
            disable_log_stats=True,
            **given,
        )
    except (ValueError, TypeError) as exc:  # pydantic's errors are ValueErrors
        raise Refused(f"vLLM refuses it: {_first_line(exc)}", field="engine") from exc


def _cache_nbytes(config: Any, positions: int, dtype: str) -> int:
    """Room for one prompt in all layers; vLLM would take half of the host's memory."""
    heads = max(getattr(config, name, None) or 0 for name in _HEADS)
    head_dim = max(getattr(config, name, None) or 0 for name in _HEAD_DIMS)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    layer_nbytes = 2 * (heads or config.num_attention_heads) * head_dim * ITEMSIZE.get(dtype, 4)
    return int(config.num_hidden_layers) * layer_nbytes * (positions + _SPARE_POSITIONS)


class VllmEngine:
    """Prefills one prompt at a time in a vLLM engine of this process."""

    def __init__(self, llm: Any, options: Options) -> None:
        self._llm: Any = llm
        self._engine = llm.llm_engine
        self._chunk = options.prefill_chunk
        if HERE.cache is None:
            raise LocalProtocolError("vLLM made no connector in this process")
        facts = HERE.cache.manifest()
        limit = int(self._engine.vllm_config.model_config.max_model_len) - 1
        self._manifest = replace(
            facts,
            role="source",
            layers=tuple(_emitted(layer, limit) for layer in facts.layers),
            layouts=("token_major",),
            first="token",
            max_positions=min(limit, options.max_positions or limit),
            prefix="none",
        )
        self._count = 0
        self.facts = {
            "model": Path(options.model).name,
            "dtype": options.dtype,
            "threads": str(options.threads),
            "attention": "vLLM",
            "cache": "vLLM",
        }

    def manifest(self) -> Manifest:
        return self._manifest

    def prefill_stream(self, tokens: Sequence[int], sink: PrefillSink, start: int = 0) -> None:
        """Compute the prompt and put its cache and first token into `sink`.

        Raises:
            Cancelled: the attempt was withdrawn.
            LocalProtocolError: the tokens or `start` do not fit the plan or the model.
            Refused: the request asks for what vLLM does not do.
        """
        if self._llm is None:
            raise Closed("the vLLM engine was closed")
        check_asked(tokens, sink, start)
        if sink.options.cuts:
            raise Refused("vLLM cuts a prefill by chunks of one length only", field="prefill_cuts")
        asked = sink.options.prefill_chunk
        if pieces(len(tokens), asked) != pieces(len(tokens), self._chunk):
            raise Refused(
                f"this vLLM source was started with prefill_chunk {self._chunk} and the request "
                f"asks for {asked}; ask for the same",
                field="prefill_chunk",
            )
        route = taker_of(sink, start)
        HERE.begin(route)
        try:
            token = self._compute(list(tokens))
            taken = HERE.end()
        except BaseException:
            HERE.end()
            raise
        if taken != len(tokens):
            raise LocalProtocolError(f"vLLM told {taken} positions of {len(tokens)}")
        route.finish()
        sink.final(None, token=token)

    def _compute(self, tokens: list[int]) -> int:
        """The token that vLLM samples first; raises what the taker raised."""
        from vllm import SamplingParams, TokensPrompt

        self._count += 1
        name = f"headrace-{self._count}"
        once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        # What it returns is vLLM's own name for it, which an abort does not know.
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), once)
        while True:
            outputs = self._engine.step()
            if HERE.failure is not None:
                self._drop(name)
                raise HERE.failure
            for output in outputs:
                if output.outputs and output.outputs[0].token_ids:
                    self._drop(name)
                    return int(output.outputs[0].token_ids[0])
            if not self._engine.has_unfinished_requests():
                raise LocalProtocolError("vLLM ended the prompt without a token")

    def _drop(self, name: str) -> None:
        """Have vLLM forget the request, so that the next one finds all blocks free."""
        if self._engine.has_unfinished_requests():
            self._engine.abort_request([name])
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def close(self) -> None:
        """Let go of vLLM, which ends its engine with the process."""
        if self._llm is not None:
            self._llm = None
            self._engine.engine_core.shutdown()


def _emitted(layer: Layer, positions: int) -> Layer:
    """Every row of a sliding layer is there when the layer is computed."""
    if isinstance(layer.kind, Sliding):
        return replace(layer, kind=Sliding(layer.kind.window, positions))
    return layer


def _first_line(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]}: {lines[1]}"
