"""What a kernel takes and returns, read from the kernel itself.

A kernel object carries its own text (`.dsl`), whose last definition names every argument with its
axes, element type and, on several chips, the axis that is split. The engine binds tensors to
arguments by these names and shapes, so that a kernel library whose order or shapes have changed is
refused instead of fed with the wrong tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from headrace.errors import BackendUnavailable

DTYPES: Final[dict[str, str]] = {
    "bf16": "bfloat16",
    "f32": "float32",
    "i32": "int32",
    "bool": "bool",
    "f8_e4": "float8_e4m3fn",
}
"""The vendor's element types, in torch's names."""

_HEAD = re.compile(r"^def (\w+)<([^>]*)>\(", re.MULTILINE)
_AXIS = re.compile(r"(\w+)=(-?\d+)(?:,|$)")
_PLAIN = re.compile(r"\[(.*)\]/(\w+)")
_DRAM = re.compile(r"dram\(\[(.*?)\] \| \[(.*?)\]\)/(\w+) @ original=\[(.*?)\]")
_SPLIT = re.compile(r"\(?(\w+)(?: @ (\w+)(?: ([/%]) (\d+))?)?\)?")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a kernel.

    shape: as the model has it, in elements. padded: the same with each axis as long as the kernel
    stores it. dtype: in torch's names. split: the axis of `padded` that lies on `chips` chips, in
    equal parts; None where each chip has all of it. placed: whether the kernel says so at all.
    """

    name: str
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    dtype: str
    split: int | None = None
    chips: int = 1
    placed: bool = False

    @property
    def on_chips(self) -> bool:
        """Whether the stored form has a leading axis of chips; one chip's part of all has none."""
        return self.placed and (self.split is None or self.chips > 1)

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape as it lies in the chips' memories: a leading axis of chips where `on_chips`."""
        if not self.on_chips:
            return self.padded
        inner = list(self.padded)
        if self.split is not None:
            inner[self.split] //= self.chips
        return (self.chips, *inner)

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The stored shape as the vendor's CPU executor takes it: where the kernel says how a
        tensor is placed, axes of length one are left out, but for that of chips.
        """
        if not self.placed:
            return self.stored
        chips = self.stored[:1] if self.on_chips else ()
        return (*chips, *(size for size in self.stored[len(chips) :] if size != 1))


@dataclass(frozen=True)
class Signature:
    """A kernel's name, its arguments in order, and its results in order."""

    name: str
    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def argument(self, name: str) -> Tensor:
        """The argument called `name`.

        Raises:
            BackendUnavailable: the kernel has none.
        """
        for argument in self.arguments:
            if argument.name == name:
                return argument
        raise changed(self.name, f"it has no argument {name!r}")


def changed(kernel: str, detail: str) -> BackendUnavailable:
    """The error for a kernel that is not what the engine was written for."""
    return BackendUnavailable(
        "furiosa",
        "api_missing",
        f"kernel {kernel}",
        detail,
        "Use the version of furiosa-kernels that `headrace rngd setup` installs",
    )


def read_signature(dsl: str) -> Signature:
    """The signature of the last definition in a kernel's text.

    Raises:
        BackendUnavailable: the text is not of the form that is understood.
    """
    heads = list(_HEAD.finditer(dsl))
    if not heads:
        raise changed("of unknown name", "its text has no definition")
    name, sizes = heads[-1][1], heads[-1][2]
    axes = {axis: int(size) for axis, size in _AXIS.findall(sizes.replace(" ", ""))}
    taken, _, rest = dsl[heads[-1].end() :].partition(") -> ")
    given = rest.partition(":\n")[0]
    reader = _Reader(name, axes)
    arguments = [reader.argument(line.strip().rstrip(",")) for line in taken.splitlines()]
    return Signature(
        name,
        tuple(argument for argument in arguments if argument is not None),
        tuple(reader.tensor("", text) for text in _pieces(given)),
    )


class _Reader:
    def __init__(self, kernel: str, axes: dict[str, int]) -> None:
        self._kernel = kernel
        self._axes = axes

    def argument(self, line: str) -> Tensor | None:
        """One line of the argument list; None for what is no tensor."""
        name, colon, text = line.partition(": ")
        if not colon or text == "Axis":
            return None
        return self.tensor(name, text)

    def tensor(self, name: str, text: str) -> Tensor:
        if (dram := _DRAM.fullmatch(text)) is not None:
            return self._placed(name, *dram.groups())
        if (plain := _PLAIN.fullmatch(text)) is not None:
            shape = tuple(self._size(axis) for axis in _listed(plain[1]))
            return Tensor(name, shape, shape, self._dtype(plain[2]))
        raise changed(self._kernel, f"argument {name!r} is {text!r}")

    def _placed(self, name: str, outer: str, inner: str, dtype: str, original: str) -> Tensor:
        shape = tuple(self._size(axis) for axis in _listed(original))
        parts = [self._part(text) for text in _listed(inner)]
        padded = tuple(size for size, _ in parts)
        cut = [at for at, (_, step) in enumerate(parts) if step]
        split = cut[0] if cut else None
        chips = self._chips(outer, padded[split] if split is not None else 0)
        whole = chips == 1 if split is None else padded[split] == chips * parts[split][1]
        if len(padded) != len(shape) or len(cut) > 1 or not whole:
            raise changed(self._kernel, f"argument {name!r} is split as {outer!r} of {inner!r}")
        return Tensor(name, shape, padded, self._dtype(dtype), split, chips, placed=True)

    def _part(self, text: str) -> tuple[int, int]:
        """The padded length of a stored axis, and its length on one chip, 0 if it is not split."""
        match = self._match(text)
        size = self._size(match[2] or match[1])
        return size, int(match[4]) if match[3] == "%" else 0

    def _chips(self, text: str, padded: int) -> int:
        """On how many chips a tensor lies in parts; 1 where each has all of it."""
        names = _listed(text)
        if names == ["Broadcast"]:
            return 1
        if len(names) != 1:
            raise changed(self._kernel, f"a tensor is split along {text!r}")
        match = self._match(names[0])
        step = int(match[4]) if match[3] == "/" else 0
        if not step or padded % step:
            raise changed(self._kernel, f"a tensor is split along {text!r}")
        return padded // step

    def _match(self, text: str) -> re.Match[str]:
        match = _SPLIT.fullmatch(text)
        if match is None:
            raise changed(self._kernel, f"an axis reads {text!r}")
        return match

    def _size(self, axis: str) -> int:
        if axis.isdigit():
            return int(axis)
        if axis not in self._axes:
            raise changed(self._kernel, f"axis {axis!r} has no size")
        return self._axes[axis]

    def _dtype(self, name: str) -> str:
        if name not in DTYPES:
            raise changed(self._kernel, f"element type {name!r} is unknown here")
        return DTYPES[name]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _pieces(text: str) -> list[str]:
    """The types of a result list: split at commas that stand outside of brackets."""
    pieces, depth, begin = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            pieces.append(text[begin:at].strip())
            begin = at + 1
    return [*pieces, text[begin:].strip()]
