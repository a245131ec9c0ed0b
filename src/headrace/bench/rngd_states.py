"""What a prefill left behind, as numbers, and how far two prefills are apart.

Two engines that both round to bf16 differ, and each differs from float32. So the measure of an
emulated kernel is its distance to float32 beside that of torch in bf16: rms for each layer and
part, where a wrong position, a wrong rope or a swapped head shows at once, and the largest single
difference of all. That does not serve over a few positions, where chance decides which engine
rounds better, nor for kernels with 8 bit weights, which round what they multiply to 8 bits too: for
these the measure is the size of the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.bench.stand import Stand, finished
from headrace.errors import HeadraceError
from headrace.plan import Plan
from headrace.runtime.requests import Request, RequestOptions

if TYPE_CHECKING:
    import torch

FACTOR: Final = 3.0
"""How many times torch's own distance to float32 an emulated layer's K or V may have."""

LOGITS_FACTOR: Final = 5.0
"""The same of the last row of logits, which is a single position."""

FEW: Final = 32
"""With fewer positions than this, or 8 bit weights, an rms is bounded by SHARE of what is wanted.
"""

SHARE: Final = 0.15


class Distance(NamedTuple):
    """The largest absolute difference, and the root of the mean square of all."""

    max: float
    rms: float


@dataclass(frozen=True)
class Prefilled:
    """One prefill: the bytes of its cells by (layer, part), and of its last row of logits.

    request: what was measured of it.
    """

    plan: Plan
    cells: dict[tuple[int, int], bytes]
    logits: bytes
    request: Request

    def same_bytes(self, other: Prefilled) -> bool:
        """Whether both have the same cells and logits, to the last bit."""
        return self.cells == other.cells and self.logits == other.logits

    def states(self) -> States:
        """The same as numbers."""
        import torch

        found = {}
        for (layer, part), raw in self.cells.items():
            shape = self.plan.layers[layer].parts[part]
            dtype: torch.dtype = getattr(torch, shape.dtype)
            flat = torch.frombuffer(bytearray(raw), dtype=dtype).to(torch.float32)
            if self.plan.layout == "token_major":
                found[layer, part] = flat.view(-1, shape.heads, shape.head_dim)
            else:
                found[layer, part] = flat.view(shape.heads, -1, shape.head_dim).transpose(0, 1)
        logits = torch.frombuffer(bytearray(self.logits), dtype=torch.float32)
        return States(found, logits)


@dataclass(frozen=True)
class States:
    """float32: [positions, heads, head_dim] by (layer, part), after rope, and a row of logits."""

    cells: dict[tuple[int, int], torch.Tensor]
    logits: torch.Tensor


class OverBound(HeadraceError):
    """An emulated prefill is further from float32 than the bound allows; the text tells where."""


def prefill(stand: Stand, tokens: Sequence[int], **asked: Any) -> Prefilled:
    """One prefill on a stand with a memory-only decoder, with its trace.

    Raises:
        RequestFailed: it did not finish.
    """
    options = RequestOptions(hold=True, max_tokens=0, trace=True, **asked)
    request = stand.owner.submit(tokens, options)
    stand.owner.run_until_done(request)
    finished(request)
    plan = stand.owner.plan_of(request)
    cells = {
        (layer.index, part): bytes(stand.owner.read(request, layer.index, part))
        for layer in plan.layers
        for part in range(len(layer.parts))
    }
    logits = bytes(request.logits)
    stand.owner.release(request)
    stand.owner.drain()
    return Prefilled(plan, cells, logits, request)


def distance(one: torch.Tensor, other: torch.Tensor) -> Distance:
    """Of two tensors of one shape."""
    apart = (one - other).abs()
    return Distance(float(apart.max()), _rms(apart))


def of_part(one: States, other: States, part: int) -> Distance:
    """Over all layers of a part: 0 = K, 1 = V."""
    each = [
        (distance(one.cells[key], other.cells[key]), one.cells[key].numel())
        for key in one.cells
        if key[1] == part
    ]
    count = sum(number for _, number in each)
    squares = sum(apart.rms**2 * number for apart, number in each)
    return Distance(max(apart.max for apart, _ in each), (squares / count) ** 0.5)


def check_bound(
    emulated: States, rounded: States, exact: States, *, quantised: bool = False
) -> None:
    """Check an emulated prefill against torch's in bf16 (`rounded`) and in float32 (`exact`).

    quantised: whether the kernels have 8 bit weights.

    Raises:
        OverBound: a layer's K or V, or the logits, are further from float32 than is allowed.
    """
    by_share = quantised or next(iter(exact.cells.values())).shape[0] < FEW
    for (layer, part), wanted in exact.cells.items():
        mine = distance(emulated.cells[layer, part], wanted)
        theirs = distance(rounded.cells[layer, part], wanted)
        allowed = SHARE * _rms(wanted) if by_share else FACTOR * theirs.rms
        _check(f"layer {layer} {'KV'[part]}, rms", mine.rms, allowed)
    for part in () if by_share else (0, 1):
        mine, theirs = (of_part(each, exact, part) for each in (emulated, rounded))
        _check(f"{'KV'[part]}, the largest difference", mine.max, FACTOR * theirs.max)
    mine, theirs = (distance(each.logits, exact.logits) for each in (emulated, rounded))
    allowed = SHARE * _rms(exact.logits) if by_share else LOGITS_FACTOR * theirs.rms
    _check("logits, rms", mine.rms, allowed)


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt())


def _check(what: str, apart: float, allowed: float) -> None:
    if not apart <= allowed:  # also where it is no number
        raise OverBound(f"{what}: {apart:.4g} from float32, at most {allowed:.4g} is allowed")
