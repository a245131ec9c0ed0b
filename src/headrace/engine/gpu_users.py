"""Who else uses a GPU, as far as the driver tells."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from headrace.engine.cuda import open_device

IDLE_NBYTES: Final = 2 << 30
"""What an idle GPU may have in use: the driver's own, and the context of the process that asks."""
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


def users(index: int = 0) -> list[str]:
    """One sentence for each sign that others use a GPU, by its number as torch counts them.

    Raises:
        BackendUnavailable: there is none.
    """
    import torch

    device = open_device(index)  # says what is missing, if something is
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    processes = smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    memory = smi("--query-gpu=uuid,memory.used")
    found = of_smi(processes, memory, uuid)
    free, total = torch.cuda.mem_get_info(index)
    device.close()
    if not (processes or memory) and total - free > IDLE_NBYTES:  # there is no nvidia-smi
        found.append(f"{(total - free) / 1e9:.1f} GB of its {total / 1e9:.1f} GB are in use")
    return found


def of_smi(processes: list[list[str]], memory: list[list[str]], uuid: str) -> list[str]:
    """What nvidia-smi tells of one GPU's users; a process in another container is not listed.

    `processes`: uuid, pid, name, MiB. `memory`: uuid, MiB, with this process's own context. This
    process, its parent and what these started are no others: an owner and its sources may share a
    GPU. Where one of them is listed, all are, and memory tells nothing more.
    """
    listed = [cells for cells in processes if len(cells) == 4 and cells[0] == uuid]
    others = [cells for cells in listed if not _is_ours(cells[1])]
    found = [f"process {cells[1]} ({cells[2]}) uses {cells[3]} MiB of it" for cells in others]
    for cells in [] if listed else memory:
        counted = len(cells) == 2 and cells[0] == uuid and cells[1].isdecimal()
        if not found and counted and int(cells[1]) << 20 > IDLE_NBYTES:
            found.append(f"{cells[1]} MiB of it are in use, by whom nvidia-smi does not tell")
    return found


def _is_ours(pid: str) -> bool:
    family = {str(os.getpid()), str(os.getppid())}
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except OSError:  # it has ended, or is another container's
        return pid in family
    return pid in family or stat.rpartition(")")[2].split()[1] in family
