"""Which vLLM versions the connector was made for; others are refused by name.

The connector interface is declared experimental by vLLM, so that a version counts only after its
base class and its calls were looked at: `tests/unit/vllm` holds the signatures of each.
"""

from __future__ import annotations

from typing import Final

from headrace.errors import Refused

SUPPORTED: Final = ((0, 32), (0, 33))
"""0.32 was run, as its CPU build; 0.33 was read, and its base class is called as that of 0.32."""

SPELLED: Final = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


def check_version(version: str) -> None:
    """Check that this vLLM is one of those that the connector was made for.

    Raises:
        Refused: it is not.
    """
    numbers = version.split(".")
    known = len(numbers) > 1 and all(number.isdigit() for number in numbers[:2])
    if not known or (int(numbers[0]), int(numbers[1])) not in SUPPORTED:
        raise Refused(
            f"this is vLLM {version}, and headrace's connector was made for {SPELLED}; install one "
            "of these",
            field="vllm",
        )
