"""What can be imported here: tried in a child process with a deadline.

An import may crash, hang in a driver, or claim a device, and it takes seconds, so `headrace doctor`
does not import torch itself. It does not trust package metadata either, which calls a broken
installation fine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Final

import msgspec
from msgspec import Struct

from headrace.backends.load import DECODERS, SOURCES
from headrace.engine.atom import environment
from headrace.engine.environments import RNGD, VLLM
from headrace.version import VERSION

IMPORTS_TIMEOUT_S: Final = 8.0
ELSEWHERE: Final = (RNGD.name, VLLM.name, environment.NAME)
"""Sources and decoders that run in an environment of their vendor's own."""


class ImportResult(Struct, frozen=True):
    """What the child process says of one module; `error` is empty where its import went well."""

    module: str
    error: str = ""
    facts: dict[str, Any] = {}


class Imports:
    """What a child process could import; it is run once, when first asked for."""

    def __init__(self) -> None:
        self._results: dict[str, ImportResult] | None = None
        self._end = ""

    def result(self, module: str) -> ImportResult:
        """How the import of `module` went, or why that is not known."""
        if self._results is None:
            self._results = self._run()
        return self._results.get(module) or ImportResult(module, self._end)

    def _run(self) -> dict[str, ImportResult]:
        script = "from headrace.cli.imports import tell_imports; tell_imports()"
        try:
            child = subprocess.run(
                [sys.executable, "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                timeout=IMPORTS_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as exc:
            told = exc.stdout or b""
            end = f"not known: it took more than {IMPORTS_TIMEOUT_S:.0f} s; a second try is faster"
        else:
            told = child.stdout
            status = child.returncode
            end = f"exit status {status}" if status >= 0 else f"signal {-status}"
        results = {result.module: result for result in _results_in(told.splitlines())}
        first = next((module for module in modules() if module not in results), "")
        self._end = f"importing {first}: {end}"  # this one is at fault, those after it untried
        return results


def modules() -> list[str]:
    """What is imported, in this order: the more likely it never returns, the later it comes.

    "cuda" is no module; it stands for the first look at the driver. What runs in a vendor's own
    environment is not tried here.
    """
    known = [*SOURCES.items(), *DECODERS.items()]
    backends = [spec.partition(":")[0] for name, spec in known if name not in ELSEWHERE]
    light = [name for name in backends if name.endswith((".replay", ".null"))]
    heavy = [name for name in backends if name not in light]
    return [*light, "torch", "transformers", *heavy, "cuda"]


def tell_imports() -> None:
    """What the child process does: import one module after another and print how each went."""
    for module in modules():
        line = msgspec.json.encode(_import(module)).decode()
        print(f"\n{line}", flush=True)  # a library's banner may have left an open line


def _import(module: str) -> ImportResult:
    try:
        match module:
            case "torch":
                return ImportResult(module, facts=_torch_facts())
            case "cuda":
                return ImportResult(module, facts=_cuda_facts())
        imported = import_module(module)
    except Exception as exc:  # whatever a package raises at import is what there is to report
        text = (str(exc).strip() or "no reason given").splitlines()[0]
        return ImportResult(module, f"{type(exc).__name__}: {text}")
    return ImportResult(module, facts={"version": str(getattr(imported, "__version__", VERSION))})


def _torch_facts() -> dict[str, Any]:
    import torch

    return {"version": str(torch.__version__), "threads": torch.get_num_threads()}


def _cuda_facts() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"devices": [torch.cuda.get_device_name(index) for index in range(count)]}


def _results_in(lines: Iterable[bytes]) -> Iterator[ImportResult]:
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=ImportResult)
        except msgspec.MsgspecError:
            continue  # something that a library printed
