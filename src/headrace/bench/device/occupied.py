"""Who else uses the GPU: asked before anything is started on it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from headrace.engine.cuda import open_device
from headrace.errors import HeadraceError, Refused

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


def ask_users() -> list[str]:
    """What `users` tells, asked in a process of its own: this one takes nothing of the GPU.

    Raises:
        Refused: there is no GPU that torch can use; the text says what is missing.
    """
    command = [sys.executable, "-m", "headrace.bench.device.occupied"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        word = (lines or done.stderr.splitlines() or ["it said nothing"])[-1]
        raise Refused(f"there is no GPU to check: {word}")
    return lines


def users() -> list[str]:
    """One sentence for each sign that others use the first GPU that this process may use.

    Raises:
        BackendUnavailable: there is none.
    """
    import torch

    device = open_device()  # says what is missing, if something is
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    found = of_smi(
        smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"),
        smi("--query-gpu=uuid,memory.used"),
        uuid,
    )
    free, total = torch.cuda.mem_get_info(0)
    device.close()
    if not found and total - free > IDLE_NBYTES:
        found.append(f"{(total - free) / 1e9:.1f} GB of its {total / 1e9:.1f} GB are in use")
    return found


def of_smi(processes: list[list[str]], memory: list[list[str]], uuid: str) -> list[str]:
    """What nvidia-smi tells of one GPU's users; a process in another container is not listed.

    `processes`: uuid, pid, name, MiB. `memory`: uuid, MiB, with this process's own context.
    """
    found = [
        f"process {cells[1]} ({cells[2]}) uses {cells[3]} MiB of it"
        for cells in processes
        if len(cells) == 4 and cells[0] == uuid and cells[1] != str(os.getpid())
    ]
    for cells in memory:
        counted = len(cells) == 2 and cells[0] == uuid and cells[1].isdecimal()
        if not found and counted and int(cells[1]) << 20 > IDLE_NBYTES:
            found.append(f"{cells[1]} MiB of it are in use, by whom nvidia-smi does not tell")
    return found


if __name__ == "__main__":
    try:
        print("\n".join(users()), end="")
    except HeadraceError as exc:
        print(exc)
        sys.exit(1)
