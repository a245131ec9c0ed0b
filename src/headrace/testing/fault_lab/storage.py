"""Where bytes really are: slots, lanes, and the copies between them, each byte known by its cell.

Nothing here asks the owner's machine. A byte's value names the request and attempt that made it and
the cell that it is; what no one wrote, or poison, is no such value. The checks are those of rules
1, 2, 3 and 5 on what really happened: who may still write or read when storage is passed on, and
what lies in an entry when it becomes visible.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from headrace.ids import AttemptId, SourceId
from headrace.testing.fault_lab.geometries import Geometry, Places, describe_key
from headrace.testing.fault_lab.safety import Broken

UNWRITTEN: Final = 0
POISON: Final = 1
WRONG: Final = 1 << 62  # added to a value: what a faulty engine leaves in a cell
_ATTEMPT: Final = 32  # bits below: the cell's key
_REQUEST: Final = 40


def origin(attempt: AttemptId) -> int:
    """What every value has that this attempt makes; a cell's key is added to it."""
    return (attempt.counter + 1) << _REQUEST | attempt.attempt << _ATTEMPT


def logits_of(attempt: AttemptId) -> int:
    """The row of logits of a request, as one value; no attempt changes it."""
    return (attempt.counter + 1) * 7919


def token_of(attempt: AttemptId) -> int:
    """The token id of a request, where its source gives no logits."""
    return attempt.counter * 31 + 5


def describe_value(value: int) -> str:
    """A byte in words."""
    if value in (UNWRITTEN, POISON):
        return "poison" if value == POISON else "what nobody wrote"
    wrong = "a wrong value for " if value & WRONG else ""
    value &= ~WRONG
    request, attempt = (value >> _REQUEST) - 1, value >> _ATTEMPT & 255
    return f"{wrong}request {request} attempt {attempt} {describe_key(value & 0xFFFFFFFF)}"


def digest_of(values: Iterable[int]) -> int:
    """A digest of 32 bits."""
    return hash(tuple(values)) & 0xFFFFFFFF


class SlotMemory:
    """One slot of one slab, as shared memory has it."""

    def __init__(self, source: SourceId, index: int) -> None:
        self.source = source
        self.index = index
        self.cells: dict[int, int] = {}
        self.empty = UNWRITTEN  # what a cell is that was not written since
        self.granted: AttemptId | None = None
        self.generation = -1
        self.logits = UNWRITTEN
        self.writing = False  # whether an engine may still write what was granted
        self.reading = 0  # copies that may still read it

    def grant(self, attempt: AttemptId, generation: int, *, poison: bool) -> None:
        """The owner grants the slot: nobody else may still write or read it."""
        if self.writing:
            raise Broken(3, f"{self} is granted to {attempt}, and {self.granted} still writes it")
        if self.reading:
            raise Broken(3, f"{self} is granted to {attempt}, and is still read for {self.granted}")
        if generation <= self.generation:
            raise Broken(3, f"{self} is granted as generation {generation} again")
        self.granted, self.generation, self.writing = attempt, generation, True
        if poison:
            self.cells.clear()
            self.empty = POISON

    def write(self, attempt: AttemptId, places: Places, *, wrong: bool = False) -> None:
        """The engine of `attempt` writes cells."""
        if self.granted != attempt:
            raise Broken(2, f"{attempt} writes {self}, which is {self.granted}'s")
        value = origin(attempt) | (WRONG if wrong else 0)
        cells = self.cells
        for offset, key in places:
            cells[offset] = value | key

    def values(self, places: Places) -> list[int]:
        """What lies at these places."""
        cells, empty = self.cells, self.empty
        return [cells.get(offset, empty) for offset, _ in places]

    def __str__(self) -> str:
        return f"slot {self.index} of source {self.source}"


class Lane:
    """One lane of the decoder's cache."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.cells: dict[int, int] = {}
        self.holder: int | None = None  # a request
        self.serial = 0  # of the reservation that holds it
        self.visible: dict[int, int] | None = None  # the entry as it was published
        self.lost = False
        self.copies = 0  # that may still write it

    def __str__(self) -> str:
        return f"lane {self.index}"


class Copying:
    """A copy from a slot into a lane, from when it may first read to when it is over.

    short: a faulty device that leaves the last byte out.
    """

    __slots__ = ("attempt", "generation", "lane", "places", "serial", "short", "slot")

    def __init__(self, attempt: AttemptId, lane: Lane, slot: SlotMemory, places: Places) -> None:
        self.short = False
        self.attempt = attempt
        self.lane = lane
        self.slot = slot
        self.places = places
        self.serial = lane.serial
        self.generation = slot.generation
        lane.copies += 1
        slot.reading += 1

    def land(self) -> None:
        """The bytes move, as late as the fence allows."""
        lane, slot = self.lane, self.slot
        lane.copies -= 1
        slot.reading -= 1
        if slot.generation != self.generation:
            raise Broken(3, f"a copy for {self.attempt} reads {slot}, now {slot.granted}'s")
        if lane.serial != self.serial:
            raise Broken(3, f"a copy for {self.attempt} writes {lane}, which was passed on")
        if lane.visible is not None:
            raise Broken(1, f"a copy for {self.attempt} writes {lane}, which is visible")
        cells = lane.cells
        places = self.places[:-1] if self.short else self.places
        for value, (_, key) in zip(slot.values(places), places, strict=True):
            cells[key] = value


class Device:
    """The decoder's lanes."""

    def __init__(self, num_lanes: int, geometry: Geometry) -> None:
        self.lanes = [Lane(at) for at in range(num_lanes)]
        self.published: dict[int, dict[int, int]] = {}  # every entry there was, by request
        self.apart: dict[int, Lane] = {}  # what is out of service, by the request that had it
        self._geometry = geometry
        self._needed: dict[int, list[int]] = {}

    def reserve(self, request: int) -> Lane | None:
        """Set the lowest free lane aside; None if there is none."""
        for lane in self.lanes:
            if lane.holder is None and not lane.lost:
                if lane.copies:
                    raise Broken(3, f"{lane} is set aside for {request} and still written")
                lane.holder = request
                lane.serial += 1
                return lane
        return None

    def held(self, request: int) -> Lane:
        """The lane of a request."""
        lane = self._lane_of(request)
        if lane is None:
            raise Broken(2, f"request {request} holds no lane")
        return lane

    def poison(self, request: int, num_tokens: int) -> None:
        """Fill a reservation with what no engine makes."""
        self.held(request).cells = dict.fromkeys(self._keys(num_tokens), POISON)

    def has_poison(self, request: int, num_tokens: int) -> bool:
        """Whether a needed cell was not imported since the reservation was filled."""
        cells = self.held(request).cells
        return any(cells.get(key) == POISON for key in self._keys(num_tokens))

    def publish(self, attempt: AttemptId, num_tokens: int) -> None:
        """Make the reservation visible: every cell must be this request's own, and in its place."""
        lane = self.held(attempt.counter)
        if lane.copies:
            raise Broken(1, f"{attempt} is published while {lane} is written")
        if lane.visible is not None:
            raise Broken(4, f"{attempt} is published twice")
        cells, own = lane.cells, origin(attempt)
        for key in self._keys(num_tokens):
            if cells.get(key) != own | key:
                raise _unlike(attempt, key, cells.get(key, UNWRITTEN))
        lane.visible = {key: cells[key] for key in self._keys(num_tokens)}
        self.published[attempt.counter] = {
            key: value & ~(255 << _ATTEMPT) for key, value in lane.visible.items()
        }

    def check_entry(self, lane: Lane) -> None:
        """A visible entry stays what it was."""
        if lane.visible is not None:
            for key, value in lane.visible.items():
                if lane.cells.get(key) != value:
                    raise Broken(2, f"{lane}: {describe_key(key)} of an entry was changed")

    def free(self, request: int) -> None:
        """Give a lane back."""
        lane = self.held(request)
        if lane.copies:
            raise Broken(3, f"{lane} of request {request} is freed and still written")
        self.check_entry(lane)
        lane.holder = lane.visible = None

    def lose(self, request: int) -> None:
        """The lane is out of service: set apart, or not to be freed."""
        lane = self._lane_of(request)
        if lane is not None:  # None: it was promised one that could not be freed
            lane.lost = True
            self.apart[request] = lane

    def reinstate(self, request: int) -> None:
        """Somebody answers for it that nothing touches what was apart."""
        lane = self.apart.pop(request, None)
        if lane is not None:
            lane.lost, lane.holder, lane.visible = False, None, None

    def pass_on(self, attempt: AttemptId) -> None:
        """The next attempt goes on with the storage of this one."""
        lane = self._lane_of(attempt.counter)
        if lane is not None and lane.copies:
            raise Broken(3, f"{lane} is passed on from {attempt} and still written")

    def _lane_of(self, request: int) -> Lane | None:
        held = (lane for lane in self.lanes if lane.holder == request and not lane.lost)
        return next(held, None)

    def _keys(self, num_tokens: int) -> list[int]:
        keys = self._needed.get(num_tokens)
        if keys is None:
            keys = self._needed[num_tokens] = self._geometry.needed(num_tokens)
        return keys


def _unlike(attempt: AttemptId, key: int, value: int) -> Broken:
    """Which rule a cell breaks that is not its request's own."""
    found = f"{attempt} is published, and {describe_key(key)} holds {describe_value(value)}"
    if value in (UNWRITTEN, POISON) or value & WRONG:
        return Broken(1, found)
    if value >> _REQUEST != attempt.counter + 1:
        return Broken(2, found)
    if value & 0xFFFFFFFF != key:
        return Broken(5, found)
    return Broken(1, f"{found}, which is of another attempt")
