"""What `--decoder` decides of the other options; each refuses with one sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headrace.engine.atom import environment
from headrace.errors import Refused

ATOM: Final = "atom"
NULL: Final = "null"
WITH_A_MODEL: Final = ("cpu", "cuda", ATOM)
LANES: Final = 4


def check_decoder(
    decoder: str,
    *,
    compiled: Path | None,
    given: Mapping[str, Any],
    lanes: int | None = None,
    decode_batch: int = 1,
) -> None:
    """Refuse what a decoder does not take, and atom without its compiled model.

    `given`: --decoder-options. `lanes`: None if none were asked for.
    """
    if decode_batch > 1 and decoder == NULL:
        raise Refused("--decode-batch is for a decoder that decodes, and null does not")
    if compiled is not None and decoder != ATOM:
        raise Refused(
            f"--compiled is for --decoder atom, and it is {decoder}; leave --compiled out",
            field="compiled",
        )
    if decoder == ATOM:
        _check_compiled(compiled, given)
        _check_one_lane(lanes, decode_batch)


def _check_compiled(compiled: Path | None, given: Mapping[str, Any]) -> None:
    if compiled is None:
        if "compiled" not in given:
            raise Refused(
                "--decoder atom needs --compiled DIR, the model as optimum-rbln compiled it for "
                "the card; docs/atom.md says how such a directory is made",
                field="compiled",
            )
    elif "compiled" in given:
        raise Refused("--compiled is given and compiled in --decoder-options; leave one out")
    elif not compiled.is_dir():
        raise Refused(
            f"--compiled: {compiled} is not a directory; docs/atom.md says how one is made",
            field="compiled",
        )


def _check_one_lane(lanes: int | None, decode_batch: int) -> None:
    if lanes not in (None, 1):
        raise Refused(f"--lanes is {lanes} and --decoder atom has one lane; leave --lanes out")
    if decode_batch != 1:
        raise Refused(
            f"--decode-batch is {decode_batch} and --decoder atom decodes one sequence; leave "
            "--decode-batch out"
        )


def options_of(
    decoder: str,
    model: Mapping[str, Any],
    *,
    compiled: Path | None,
    share_device: bool = False,
) -> dict[str, Any]:
    """The options of a decoder that the flags give: its model, unless it has none.

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
    decoder: str, given: str | None, decoder_options: Mapping[str, Any]
) -> str | None:
    """The interpreter of a decoder's environment: the given one, or for atom the vendor's; None for
    this process's own, where a fake of the vendor's packages runs too.

    Raises:
        BackendUnavailable: no interpreter has the vendor's packages.
    """
    interpreter = given
    if given is None and decoder == ATOM and not is_fake(decoder, decoder_options):
        interpreter = environment.find()
    return None if interpreter == sys.executable else interpreter


def is_fake(decoder: str, decoder_options: Mapping[str, Any]) -> bool:
    """Whether a fake stands in for the packages of a decoder's vendor."""
    return decoder == ATOM and bool(decoder_options.get("sdk"))
