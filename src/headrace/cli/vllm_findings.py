"""What `headrace doctor` says of the vLLM source: its environment, and whose version that has."""

from __future__ import annotations

import subprocess
from typing import Final

from headrace.cli.findings import Finding, unavailable
from headrace.engine import environments
from headrace.engine.environments import VLLM
from headrace.engine.vllm.versions import SPELLED, check_version
from headrace.errors import BackendUnavailable, Refused

ENVIRONMENT: Final = "source vllm"
ADVICE: Final = "run: headrace vllm-env"

_TELL: Final = "import importlib.metadata as found; print(found.version('vllm'))"
_TIMEOUT_S: Final = 30.0


def find_environment() -> Finding:
    """Find the environment of the vLLM source, and see whether its version is one of ours."""
    try:
        interpreter = environments.find(VLLM)
    except BackendUnavailable as exc:
        return unavailable(ENVIRONMENT, exc)
    facts = {"interpreter": interpreter}
    try:
        told = subprocess.run(
            [interpreter, "-c", _TELL],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as exc:
        return Finding(ENVIRONMENT, "note", f"{interpreter}: {exc}", ADVICE, facts)
    version = told.stdout.strip()
    if told.returncode or not version:
        return Finding(ENVIRONMENT, "note", f"{interpreter} has no vLLM", ADVICE, facts)
    facts["version"] = version
    try:
        check_version(version)
    except Refused as exc:
        return Finding(ENVIRONMENT, "note", str(exc), f"install vLLM {SPELLED} there", facts)
    return Finding(ENVIRONMENT, "ok", f"vLLM {version} in {interpreter}", facts=facts)
