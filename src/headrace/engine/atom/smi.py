"""What `rbln-smi` says: the driver, the cards, and who uses them.

It is part of the driver's package and needs no Python package. `rbln-smi -j` prints one JSON
object; its form is that of the vendor's own library for it, rblnlib-go, and of what others have
published of drivers 3.x. Whatever is of another form is told, and not guessed at. It was never run
by headrace's authors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from headrace.engine.atom.sdk import VENDOR
from headrace.errors import BackendUnavailable

COMMAND: Final = "rbln-smi"
PROBE: Final = "rbln-smi -j"
TIMEOUT_S: Final = 10.0
UNKNOWN: Final = "N/A"
CHOOSERS: Final = ("RBLN_DEVICES", "RBLN_VISIBLE_DEVICES")
"""What names the cards that a process may use to the vendor's runtime; the first that is set."""

DRIVER: Final = (
    "Install the vendor's driver package, which has rbln-smi; in a container, the vendor's toolkit "
    "for containers brings it in"
)
_DEVICES = Path("/dev")
_CLASS = Path("/sys/class/rebellions")
_CHOOSE = "Choose a device that is there"


class Memory(Struct, frozen=True):
    """Of one card, in bytes."""

    used: int
    total: int


class Pci(Struct, frozen=True):
    """Where a card is plugged in."""

    bus_id: str


class Card(Struct, frozen=True):
    """What the vendor calls an NPU; `npu` need not be its own alone, `device` is."""

    npu: int
    name: str
    device: Annotated[str, Meta(pattern=r"^rbln[0-9]+$")]
    pci: Pci
    memory: Memory

    @property
    def number(self) -> int:
        """The kernel's number of it: N of /dev/rblnN."""
        return int(self.device.removeprefix("rbln"))

    def __str__(self) -> str:
        used, total = self.memory.used / 2**30, self.memory.total / 2**30
        return f"{self.device}, {self.name}, {self.pci.bus_id}, {used:.1f} of {total:.1f} GiB used"


class Context(Struct, frozen=True):
    """A process that holds a card; `memalloc` as it is told, such as 3.5GiB."""

    npu: int
    pid: int
    process: str
    memalloc: str

    def __str__(self) -> str:
        return f"{self.process} (pid {self.pid}, {self.memalloc})"


class Said(Struct, frozen=True, rename={"kmd": "KMD_version"}):
    """All that is read of what `rbln-smi -j` prints."""

    kmd: str
    devices: tuple[Card, ...]
    contexts: tuple[Context, ...]

    @property
    def driver(self) -> str:
        """The kernel driver's version; empty where it is not told."""
        return "" if self.kmd == UNKNOWN else self.kmd

    @property
    def driver_line(self) -> str:
        """The same, for people."""
        return f"driver {self.driver or 'of no known version'}"

    def card(self, device: int) -> Card:
        """The card that `device` stands for, as the vendor's runtime counts those it may use.

        Raises:
            BackendUnavailable: no_device.
        """
        usable = _usable(self)
        names = ", ".join(f"rbln{number}" for number in usable) or "none"
        if not 0 <= device < len(usable):
            text = f"device {device} was asked for, and the cards are {names}"
            raise _failed("no_device", text, _CHOOSE)
        for card in self.devices:
            if card.number == usable[device]:
                return card
        listed = ", ".join(card.device for card in self.devices) or "none"
        text = f"device {device} is rbln{usable[device]}, and it lists {listed}"
        raise _failed("no_device", text, _CHOOSE)

    def users(self, card: Card) -> list[Context]:
        """The contexts on a card, and those that may be: on some boards cards share a number."""
        return [context for context in self.contexts if context.npu == card.npu]


def ask(timeout_s: float = TIMEOUT_S) -> Said:
    """Run `rbln-smi -j` and read what it prints.

    Raises:
        BackendUnavailable: driver_missing: it is not there, or it fails. api_missing: it prints
            something else.
    """
    command = shutil.which(COMMAND)
    if command is None:
        nodes = ", ".join(f"/dev/rbln{number}" for number in _nodes())
        text = f"{COMMAND} is not on PATH" + (f", and there are {nodes}" if nodes else "")
        raise _failed("driver_missing", text, DRIVER)
    try:
        done = subprocess.run(
            [command, "-j"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as exc:
        text = f"it did not end within {timeout_s:g} s"
        raise _failed("driver_missing", text, DRIVER) from exc
    except OSError as exc:
        text = f"it cannot be run: {exc.strerror}"
        raise _failed("driver_missing", text, DRIVER) from exc
    if done.returncode != 0:
        text = f"it ended with exit status {done.returncode}: {_line(done.stderr + done.stdout)}"
        raise _failed("driver_missing", text, DRIVER)
    try:
        # Numbers are quoted or not, from one version to the next.
        return msgspec.json.decode(done.stdout, type=Said, strict=False)
    except msgspec.MsgspecError as exc:
        text = f"{COMMAND} printed something else: {_line(done.stdout)} ({exc})"
        hint = "headrace was written for what rbln-smi of drivers 3.x prints; use such a one"
        raise _failed("api_missing", text, hint) from exc


def known_to_kernel() -> list[str]:
    """The cards that the kernel's driver has told of; none where there is no driver."""
    if not _CLASS.is_dir():
        return []
    return sorted(path.name for path in _CLASS.iterdir() if re.fullmatch("rbln[0-9]+", path.name))


def _usable(said: Said) -> list[int]:
    """Kernel numbers of the cards that this process may use, in the order of its device numbers.

    In a container /dev has the host's numbers, and only of the cards that are there.
    """
    present = _nodes() or sorted(card.number for card in said.devices)
    chooser = next((name for name in CHOOSERS if os.environ.get(name, "").strip()), "")
    if not chooser:
        return present
    chosen = os.environ[chooser]
    words = chosen.replace(",", " ").split()
    places = [int(word) for word in words if word.isdecimal()]
    if len(places) != len(words) or places != sorted(set(places)):
        text = f"{chooser} is {chosen!r}, and which card is the first is not known of that"
        raise _failed("no_device", text, f"Have {chooser} list numbers upwards, or leave it out")
    named = [present[place] if place < len(present) else place for place in places]
    return [number for number in named if number in present]


def _nodes() -> list[int]:
    """The numbers of the cards in /dev."""
    numbers = [re.fullmatch("rbln([0-9]+)", path.name) for path in _DEVICES.glob("rbln*")]
    return sorted(int(found[1]) for found in numbers if found)


def _line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    return next((line for line in lines if line), "nothing")[:200]


def _failed(stage: str, detail: str, hint: str) -> BackendUnavailable:
    return BackendUnavailable(VENDOR, stage, PROBE, detail, hint)
