"""Who else uses the GPU: asked before anything is started on it."""

from __future__ import annotations

import subprocess
from typing import Final

from headrace.engine.cuda import open_device

FREE_MIB: Final = 1024
"""What an idle GPU may have in use, as nvidia-smi tells it: the driver's own."""
FREE_NBYTES: Final = 2 << 30
"""The same as torch tells it, which counts this process's own context too."""
_TIMEOUT_S: Final = 20.0


def smi(*arguments: str) -> list[list[str]]:
    """The cells of what nvidia-smi answers as CSV; nothing where it is missing or fails."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = done.stdout.splitlines()
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]


def users() -> list[str]:
    """One sentence for each sign that others use the first GPU that this process may use.

    Raises:
        BackendUnavailable: there is none.
    """
    import torch

    open_device().close()  # says what is missing, if something is
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    found = of_smi(
        smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"),
        smi("--query-gpu=uuid,memory.used"),
        uuid,
    )
    free, total = torch.cuda.mem_get_info(0)
    if not found and total - free > FREE_NBYTES:
        found.append(f"{(total - free) / 1e9:.1f} GB of its {total / 1e9:.1f} GB are in use")
    return found


def of_smi(processes: list[list[str]], memory: list[list[str]], uuid: str) -> list[str]:
    """What nvidia-smi tells of one GPU's users; a process in another container is not listed.

    `processes`: uuid, pid, name, MiB. `memory`: uuid, MiB, with this process's own context.
    """
    import os

    found = []
    for cells in processes:
        if len(cells) == 4 and cells[0] == uuid and cells[1] != str(os.getpid()):
            found.append(f"process {cells[1]} ({cells[2]}) uses {cells[3]} MiB of it")
    for cells in memory:
        if not found and len(cells) == 2 and cells[0] == uuid and cells[1].isdecimal():
            used = int(cells[1])
            if used > 2 * FREE_MIB:
                found.append(f"{used} MiB of it are in use, by whom nvidia-smi does not tell")
    return found
