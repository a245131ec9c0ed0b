"""Random elements of every dtype that a cache may have."""

from __future__ import annotations

import random
import struct
from array import array


def random_elements(dtype: str, nbytes: int, rng: random.Random, *, coarse: bool = False) -> bytes:
    """`nbytes` bytes of finite elements between -1 and 1.

    coarse: multiples of 1/128, which every float of 16 bits or more has, so no cast changes them.
    """

    def draw() -> float:
        return rng.randrange(-127, 128) / 128 if coarse else rng.uniform(-1, 1)

    match dtype:
        case "float32":
            return array("f", (draw() for _ in range(nbytes // 4))).tobytes()
        case "float64":
            return array("d", (draw() for _ in range(nbytes // 8))).tobytes()
        case "float16":
            count = nbytes // 2
            return struct.pack(f"<{count}e", *(draw() for _ in range(count)))
        case "bfloat16":  # the upper half of a float32
            wide = array("f", (draw() for _ in range(nbytes // 2))).tobytes()
            return b"".join(wide[at + 2 : at + 4] for at in range(0, len(wide), 4))
        case _:
            return bytes(rng.randrange(64) for _ in range(nbytes))
