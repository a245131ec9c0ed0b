"""Bugs of the CUDA decoder and of pinning, planted one at a time: a scene finds each.

How they are written down is told in `headrace.testing.planting`; the instances are scenes of
`headrace.testing.device_scenes`.
"""

from __future__ import annotations

from typing import Final

from headrace.backends.cuda import CudaDecoder
from headrace.backends.lane_copies import CopyFence, LaneCopies
from headrace.backends.pinning import Pins
from headrace.engine.lanes import FullRows, SlidingRows
from headrace.engine.loading import LoadedModel
from headrace.engine.registration import Registrations
from headrace.errors import HeadraceError
from headrace.testing.device_ground import Ground
from headrace.testing.device_scenes import SCENES
from headrace.testing.planting import Mutant, read_mutants


def hunt(mutant: Mutant, ground: Ground) -> str | None:
    """Play its scene with the bug planted; returns how it was found, None if it survived."""
    with mutant.planted():
        try:
            SCENES[mutant.instance](ground)
        except HeadraceError as exc:
            return f"{type(exc).__name__}: {exc}"
    return None


_DECODER: Final = r"""
[CudaDecoder.publish]
decode_waits: decode does not wait for the copies
    self._copies.before_decode(entry.lane) => pass
slabs_come_and_go: slabs are unpinned when something is published
    self._copies.before_decode(entry.lane) => self._pins.close()
[CudaDecoder.decode_step]
decode_waits: models run on no stream of the device
    with self._device.on_compute(): => if True:
[CudaDecoder.free]
lanes_are_quiet: a lane is freed with copies in flight
    self._copies.check_quiet(held.lane) => pass
lanes_are_reused: a lane is freed without a word to the copies
    self._copies.give_back(held.lane) => pass
[CudaDecoder.read]
reads_wait: what is read is not waited for
    self._device.record(self._reads).wait() => pass
reads_wait: reading waits for nothing on the device
    self._copies.before_read(held.lane, self._reads) => pass
[CudaDecoder.unregister]
slabs_come_and_go: a slab is unmapped while it is pinned
    self._pins.unregister(slab) => pass
[CudaDecoder.close]
closing_drains: slabs are unpinned before the device is idle
    self._device.synchronize() => pass
closing_drains: slabs stay pinned
    self._pins.close() => pass
[LaneCopies.before_decode]
decode_waits: the wrong stream waits before decode
    self._device.wait(self._device.compute, event) => self._device.wait(self._link, event)
decode_waits: decode waits for the wrong event
    self._device.wait(self._device.compute, event) =>
        self._device.wait(self._device.compute, self._device.record(self._device.compute))
decode_waits_for_its_own: decode waits for everything that is queued
    self._device.wait(self._device.compute, event) =>
        self._device.wait(self._device.compute, self._device.record(self._layout))
decode_waits: the host waits before decode
    self._device.wait(self._device.compute, event) => event.wait()
[LaneCopies.begin]
decode_waits: it is forgotten what decode waits for
    self._last.setdefault(lane, {})[stream.name] = ended => pass
fences_tell: the event of a fence is on the wrong stream
    stream = self._layout => stream = self._link
fences_tell: the event of a fence is recorded before the copies
    ended = self._device.record(stream) => ended = begun
fences_tell: nothing keeps the slot that is copied from
    slot.buffer, flying) => None, flying)
lanes_are_quiet: what is in flight is not noted
    self._flights.setdefault(lane, set()) => set()
lanes_are_reused: copies do not come after what was given back
    self._after_what_was_given_back() => pass
[CopyFence.done]
fences_tell: a fence is done at once
    if not self._ended.done(): => if False:
slots_are_let_go: a fence keeps the slot for good
    self._kept = None => pass
slots_are_let_go: a fence is never done
    self._done = True => return False
[LaneCopies.give_back]
lanes_are_reused: a lane is given back by the wrong event
    self._device.record(self._device.compute) => self._device.record(self._link)
[LaneCopies._after_what_was_given_back]
lanes_are_reused: the wrong stream waits for what was given back
    self._device.wait(self._link, => self._device.wait(self._layout,
lanes_are_reused: what was given back is waited for by nobody
    if self._given_back is not None: => if False:
[LaneCopies.check_quiet]
lanes_are_quiet: a lane with copies in flight is quiet
    if left: => if False:
lanes_are_quiet: the host waits for what is in flight
    if left: => [fence._ended.wait() for fence in left]\n    if False:
[LaneCopies._through_ring]
ring_is_fenced: a place of the ring is filled while it is read
    device.wait(self._link, place.read) => pass
ring_is_fenced: a place of the ring is free by the wrong event
    place.read = device.record(self._layout) => place.read = device.record(self._link)
ring_is_fenced: cells are laid out before they have landed
    device.wait(self._layout, device.record(self._link)) => pass
ring_is_fenced: the wrong stream waits for what has landed
    device.wait(self._layout, device.record(self._link)) =>
        device.wait(self._link, device.record(self._layout))
host_waits_for_logits: what the ring holds goes to the host
    lambda: _copy(target, cells) => lambda: _copy(target, cells.to("cpu"))
ring_is_fenced: cells are laid out on no stream of the device
    device.launch(self._layout, lambda: _copy(target, cells)) => _copy(target, cells)
ring_is_fenced: one place of the ring is used for all
    self._next_place = (self._next_place + 1) % len(self._ring) => place.read = None
[LaneCopies.before_read]
reads_wait: reading does not come after compute
    self._device.wait(stream, self._device.record(self._device.compute)) => pass
reads_wait: reading does not come after the copies
    self._device.wait(stream, event) => pass
[LaneCopies.move]
entries_are_kept: moves do not come after compute
    device.wait(self._link, device.record(device.compute)) => pass
entries_are_kept: compute does not come after moves
    device.wait(device.compute, ended) => pass
entries_are_kept: the wrong stream comes after moves
    device.wait(device.compute, ended) => device.wait(self._layout, ended)
entries_are_kept: nothing keeps what is moved
    CopyFence(device, begun, ended, tuple(moves), self._moving) => pass
"""

_MODEL: Final = r"""
[LoadedModel.forward_logits]
host_waits_for_logits: a number is looked at after each forward
    return logits.to => logits[0].item()\n        return logits.to
[FullRows.update]
host_waits_for_logits: a number is looked at whenever a layer keeps its rows
    self.append(key_states, value_states) =>
        self.append(key_states, value_states)\n    key_states[0, 0, 0, 0].item()
[SlidingRows.update]
host_waits_for_logits: the host counts what a sliding layer holds
    self.append(key_states, value_states) =>
        self.append(key_states, value_states)\n    value_states.isnan().nonzero()
"""

_PINS: Final = r"""
[Pins.register]
pinning_may_fail: each failure is said
    if self._failures == 1: => if True:
pinning_may_fail: no failure is said
    if self._failures == 1: => if False:
pinning_may_fail: a failure is not caught
    except DeviceError as exc: => except KeyError as exc:
pinning_may_fail: a slab that is not pinned counts as pinned
    return\n    self._pinned => self._pinned
[Pins.unregister]
pinning_may_fail: a slab stays registered
    self._device.unregister(slab.address) => pass
[Pins._pin]
small_is_tried_first: the whole is tried first
    if small.nbytes < slab.nbytes: => if False:
pinning_may_fail: what was tried stays registered
    self._device.unregister(small.address) => pass
[Pins._in_one_way]
small_is_tried_first: a device that does not know the flag pins nothing
    continue => raise
[Registrations.register]
pinning_may_fail: the last error is left behind
    self._calls.take_last_error() => pass
pinning_may_fail: it is forgotten what is registered
    self._nbytes[address] = nbytes => pass
"""

_PLACES: Final = {
    each.__name__: each
    for each in (
        CudaDecoder,
        CopyFence,
        FullRows,
        LaneCopies,
        LoadedModel,
        Pins,
        Registrations,
        SlidingRows,
    )
}

MUTANTS: Final = read_mutants(_DECODER + _MODEL + _PINS, _PLACES)
