"""What a source and a decoder decide of their other options; each refuses with one sentence.

The sentence calls an option what its user called it: a flag, or a key of a file (`Spelling`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.engine import environments
from headrace.engine.atom import environment
from headrace.engine.environments import RNGD, VLLM, Recipe
from headrace.errors import BackendUnavailable, Refused
from headrace.runtime.interpreters import check_interpreter

REPLAY: Final = "replay"
ATOM: Final = "atom"
NULL: Final = "null"
ENVIRONMENTS: Final[dict[str, Recipe]] = {RNGD.name: RNGD, VLLM.name: VLLM}
"""Of the sources that have one of their own."""
TAKE_A_MODEL: Final = ("torch", "cuda", *ENVIRONMENTS)
WITH_A_MODEL: Final = ("cpu", "cuda", ATOM)
RNGD_DTYPE: Final = "bfloat16"
DTYPE: Final = "float32"
LANES: Final = 4


@dataclass(frozen=True)
class Spelling:
    """What the user calls an option such as `source_python`.

    first: where a sentence names it first. later: after that, or as the start of its value.
    """

    first: Callable[[str], str]
    later: Callable[[str], str]


def flag_of(name: str) -> str:
    """The flag of an option's name."""
    return f"--{name.replace('_', '-')}"


FLAGS: Final = Spelling(flag_of, flag_of)


def check_source(
    source: str, *, dtype: str | None, emulate: bool, spelling: Spelling = FLAGS
) -> None:
    """Refuse to emulate another source than rngd, and a dtype that rngd does not compute in."""
    first, later = spelling.first, spelling.later
    if emulate and source != RNGD.name:
        raise Refused(
            f"{first('emulate')} is for {later('source')} rngd, and it is {source}; leave "
            f"{later('emulate')} out"
        )
    if source == RNGD.name and dtype not in (None, RNGD_DTYPE):
        raise Refused(
            f"{first('dtype')} is {dtype} and {later('source')} rngd computes in {RNGD_DTYPE}; "
            f"leave {later('dtype')} out",
            field="dtype",
        )


def dtype_for(source: str, given: str | None) -> str:
    """The dtype of weights and cache, on both sides."""
    return given or (RNGD_DTYPE if source == RNGD.name else DTYPE)


def options_for(
    source: str,
    model: Mapping[str, Any],
    *,
    emulate: bool = False,
    share_device: bool = False,
    prefill_chunk: int = 0,
) -> dict[str, Any]:
    """The options of a source that its pair gives: its model, unless it is replay.

    `model`: of the checkpoint, empty if none was named. `prefill_chunk`: of its requests, which a
    vLLM engine is started with.
    """
    if source == REPLAY:
        return {}
    options = dict(model)
    if source == VLLM.name and prefill_chunk:
        options["prefill_chunk"] = prefill_chunk
    if source == RNGD.name:
        flags = {"emulate": emulate, "share_device": share_device}
        options |= {name: True for name, given in flags.items() if given}
    return options


def interpreter_for(source: str, given: str | None, *, spelling: Spelling = FLAGS) -> str | None:
    """The interpreter of a source's environment: the given one, or for rngd and vllm the one that
    `headrace rngd setup` or `headrace vllm-env` made; None for this process's own.

    Raises:
        BackendUnavailable: there is no environment for it.
        Refused: it cannot run headrace, or its headrace is another version.
    """
    interpreter = given
    if given is None and source in ENVIRONMENTS:
        with _hint_spelled("source_python", spelling):
            interpreter = environments.find(ENVIRONMENTS[source])
    if interpreter is not None:
        check_interpreter(interpreter, spelling.first("source_python"))
    return interpreter


def check_decoder(
    decoder: str,
    *,
    compiled: Path | None,
    given: Mapping[str, Any],
    lanes: int | None = None,
    decode_batch: int = 1,
    spelling: Spelling = FLAGS,
) -> None:
    """Refuse what a decoder does not take, and atom without its compiled model.

    `given`: options of its own. `lanes`: None if none were asked for.
    """
    first, later = spelling.first, spelling.later
    if decode_batch > 1 and decoder == NULL:
        raise Refused(f"{first('decode_batch')} is for a decoder that decodes, and null does not")
    if compiled is not None and decoder != ATOM:
        raise Refused(
            f"{first('compiled')} is for {later('decoder')} atom, and it is {decoder}; leave "
            f"{later('compiled')} out",
            field="compiled",
        )
    if decoder == ATOM:
        _check_compiled(compiled, given, spelling)
        _check_one_lane(lanes, decode_batch, spelling)


def _check_compiled(compiled: Path | None, given: Mapping[str, Any], spelling: Spelling) -> None:
    first, later = spelling.first, spelling.later
    if compiled is None:
        if "compiled" not in given:
            raise Refused(
                f"{first('decoder')} atom needs {later('compiled')} DIR, the model as "
                "optimum-rbln compiled it for the card; docs/atom.md says how such a directory "
                "is made",
                field="compiled",
            )
    elif "compiled" in given:
        raise Refused(
            f"{first('compiled')} is given and compiled in {later('decoder_options')}; leave one "
            "out"
        )
    elif not compiled.is_dir():
        raise Refused(
            f"{first('compiled')}: {compiled} is not a directory; docs/atom.md says how one is "
            "made",
            field="compiled",
        )


def _check_one_lane(lanes: int | None, decode_batch: int, spelling: Spelling) -> None:
    first, later = spelling.first, spelling.later
    if lanes not in (None, 1):
        raise Refused(
            f"{first('lanes')} is {lanes} and {later('decoder')} atom has one lane; leave "
            f"{later('lanes')} out"
        )
    if decode_batch != 1:
        raise Refused(
            f"{first('decode_batch')} is {decode_batch} and {later('decoder')} atom decodes one "
            f"sequence; leave {later('decode_batch')} out"
        )


def options_of(
    decoder: str,
    model: Mapping[str, Any],
    *,
    compiled: Path | None,
    share_device: bool = False,
) -> dict[str, Any]:
    """The options of a decoder that its pair gives: its model, unless it has none.

    `model`: of the checkpoint, empty if none was named.
    """
    if decoder == NULL:
        return {}
    options = dict(model)
    if compiled is not None:
        options["compiled"] = str(compiled.absolute())
    if share_device and decoder == ATOM:
        options["share_device"] = True
    return options


def interpreter_for_decoder(
    decoder: str,
    given: str | None,
    decoder_options: Mapping[str, Any],
    *,
    spelling: Spelling = FLAGS,
) -> str | None:
    """The interpreter of a decoder's environment: the given one, or for atom the vendor's; None for
    this process's own, where a fake of the vendor's packages runs too.

    Raises:
        BackendUnavailable: no interpreter has the vendor's packages.
    """
    interpreter = given
    if given is None and decoder == ATOM and not is_fake(decoder, decoder_options):
        with _hint_spelled("decoder_python", spelling):
            interpreter = environment.find()
    return None if interpreter == sys.executable else interpreter


@contextmanager
def _hint_spelled(option: str, spelling: Spelling) -> Iterator[None]:
    """Have the hint of what is missing name the option as its user does."""
    try:
        yield
    except BackendUnavailable as exc:
        hint = exc.hint.replace(flag_of(option), spelling.first(option))
        raise BackendUnavailable(exc.vendor, exc.stage, exc.probe, exc.detail, hint) from exc


def is_emulated(source: str, source_options: Mapping[str, Any]) -> bool:
    """Whether a source's kernels run on the CPU, whichever option asked for it."""
    return source == RNGD.name and bool(source_options.get("emulate"))


def is_fake(decoder: str, decoder_options: Mapping[str, Any]) -> bool:
    """Whether a fake stands in for the packages of a decoder's vendor."""
    return decoder == ATOM and bool(decoder_options.get("sdk"))


def pair_name(source: str, decoder: str, *, emulated: bool, fake: bool) -> str:
    """A pair as it is named wherever a figure of it is shown.

    An emulated source always says so, and so does a decoder on a fake of its vendor's packages.
    """
    marks = " (emulated)" if emulated else "", " (fake)" if fake else ""
    return f"{source}{marks[0]} -> {decoder}{marks[1]}"
