"""headrace as a KV connector of vLLM, unpatched.

`kv_connector_module_path="headrace.vllm"`, `kv_connector="HeadraceConnector"`: as `kv_consumer` a
vLLM engine is a decoder whose prompts are prefilled by headrace's sources and streamed into blocks
that it reserved; as `kv_producer` it is the engine of such a source. docs/vllm.md is the recipe.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["HeadraceConnector"]


def __getattr__(name: str) -> Any:
    if name == "HeadraceConnector":
        return import_module("headrace.vllm.connector").HeadraceConnector
    raise AttributeError(f"module 'headrace.vllm' has no attribute {name!r}")
