"""What the box is: device, driver, link, versions, memory limits, and what `doctor` says."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from headrace.bench.device.place import Place
from headrace.engine.capacity import available_nbytes
from headrace.engine.gpu_users import smi

_SMI_FIELDS: Final = (
    "name",
    "driver_version",
    "pci.bus_id",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "memory.total",
    "memory.used",
    "compute_mode",
    "mig.mode.current",
    "ecc.mode.current",
)
_HUGEPAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODES: Final = Path("/sys/devices/system/node")
_DOCTOR_S: Final = 15.0


def run(place: Place, step: str, say: Callable[[str], None]) -> None:
    """One row of facts, and `doctor.txt`."""
    row = {"measure": "environment", **_device(place), **_host(), "doctor": _doctor(place)}
    for name, value in place.rows(step).append(row).items():
        say(f"{name}: {value}")


def _device(place: Place) -> dict[str, Any]:
    if place.kind == "fake":
        return {"name": "the fake device of the tests: no GPU was used"}
    import torch

    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    answers = smi(f"--query-gpu={','.join(_SMI_FIELDS)}", f"--id=GPU-{properties.uuid}")
    told = dict(zip(_SMI_FIELDS, answers[0], strict=False)) if answers else "it tells nothing"
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "free_nbytes": free,
        "total_nbytes": total,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nvidia_smi": told,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    }


def _host() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "memlock_nbytes": [_limit(soft), _limit(hard)],
        "available_nbytes": available_nbytes(),
        "hugepages": _HUGEPAGES.read_text().strip() if _HUGEPAGES.exists() else "not told",
        "numa": _numa(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "interpreter": sys.executable,
    }


def _limit(value: int) -> int | str:
    return "unlimited" if value == resource.RLIM_INFINITY else value


def _numa() -> dict[str, str]:
    """The CPUs of each node."""
    nodes = sorted(_NODES.glob("node[0-9]*")) if _NODES.is_dir() else []
    return {node.name: (node / "cpulist").read_text().strip() for node in nodes}


def _doctor(place: Place) -> str:
    """What became of `headrace doctor`; its words are in a file of their own."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headrace", "doctor"],
            capture_output=True,
            text=True,
            timeout=_DOCTOR_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not come back within {_DOCTOR_S:g} s"
    (place.folder / "doctor.txt").write_text(done.stdout + done.stderr)
    return f"exit status {done.returncode}, see doctor.txt"
