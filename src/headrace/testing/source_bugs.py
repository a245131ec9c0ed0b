"""Bugs of the CUDA source, planted one at a time: a scene on a device model finds each.

How they are written down is told in `headrace.testing.planting`; the instances are scenes of
`headrace.testing.source_scenes`.
"""

from __future__ import annotations

from typing import Final

from headrace.backends.cuda_source import CudaEngine
from headrace.backends.device_carrier import DeviceCarrier
from headrace.engine.prefill import TakenCache
from headrace.errors import HeadraceError
from headrace.testing.planting import Mutant, read_mutants
from headrace.testing.source_scenes import SCENES, Bench


def hunt(mutant: Mutant, bench: Bench) -> str | None:
    """Play its scene with the bug planted; returns how it was found, None if it survived."""
    with mutant.planted():
        try:
            SCENES[mutant.instance](bench)
        except HeadraceError as exc:
            return f"{type(exc).__name__}: {exc}"
    return None


_BUGS: Final = r"""
[DeviceCarrier.carry]
cells_are_told_when_they_are_there: states are copied while they are computed
    device.wait(side, self._made) => pass
cells_are_told_when_they_are_there: the wrong stream waits for states
    device.wait(side, self._made) => device.wait(device.compute, device.record(side))
cells_are_told_when_they_are_there: copies wait for an event of before
    self._made = device.record(device.compute) => self._made = self._told
cells_are_told_when_they_are_there: nothing keeps the states that are copied
    self._enqueue(_Queued(writing.copied, pieces)) => pass
cells_are_told_when_they_are_there: states are let go when their copies begin
    self._enqueue(_Queued(writing.copied, pieces)) => self._enqueue(_Queued(self._made, pieces))
cells_are_told_when_they_are_there: the event of an announcement is recorded before the copies
    = self._made, device.record(side) => = self._made, writing.begun
[DeviceCarrier.computed]
cells_are_told_when_they_are_there: what an earlier layer waited for stands for this one
    self._made = None => pass
[DeviceCarrier._piece_of]
cells_are_told_when_they_are_there: what is made for a copy is copied before it is there
    self._made = None  # for it is made here, on the compute stream => pass
[DeviceCarrier.commit]
cells_are_told_when_they_are_there: a writer is announced at once
    self._enqueue(_Queued(writing.copied, [], writing)) => writer.commit()
[DeviceCarrier._poll]
cells_are_told_when_they_are_there: what is committed is announced at once
    while self._queue and self._queue[0].copied.done(): => while self._queue:
the_prefill_ends_with_its_logits: the end is when the host looked
    min(seen_ns, self._device.times(computed, computed).ended_ns) => seen_ns
the_prefill_ends_with_its_logits: the end may be yet to come
    min(seen_ns, self._device.times(computed, computed).ended_ns) =>
        self._device.times(computed, computed).ended_ns
[DeviceCarrier.settle]
cells_are_told_when_they_are_there: what is left at the end is not announced
    while self._queue: => while False:
[DeviceCarrier._copy]
cells_are_told_when_they_are_there: later positions are copied over the first ones
    begin + (first - place.start) * part.head_nbytes => begin
[DeviceCarrier.take_logits]
cells_are_told_when_they_are_there: logits are copied while they are computed
    device.wait(side, self._row_computed) => pass
cells_are_told_when_they_are_there: nothing keeps the logits that are copied
    self._row, self._row_copied = row, device.record(side) =>
        self._row, self._row_copied = None, device.record(side)
[DeviceCarrier.logits]
cells_are_told_when_they_are_there: logits are not waited for
    self._wait_for(copied) => pass
[DeviceCarrier.drain]
a_cancel_leaves_the_slot_quiet: draining does not wait
    self._device.record(self._side).wait() => pass
a_cancel_leaves_the_slot_quiet: another stream is drained
    self._device.record(self._side).wait() => self._device.record(self._device.compute).wait()
[CudaEngine._compute]
cells_are_told_when_they_are_there: the host takes the logits of each piece
    left -= ids.shape[1] => left -= ids.shape[1]; row[:1].cpu()
[TakenCache._drop]
cells_are_told_when_they_are_there: the host takes a state of each layer
    kept = self.layers[layer_idx] =>
        kept = self.layers[layer_idx]; kept.keys[0, 0, 0, :1].cpu()
[CudaEngine.prefill_stream]
a_cancel_leaves_the_slot_quiet: a cancelled prefill is not drained
    carrier.drain() => pass
a_cancel_leaves_the_slot_quiet: only an interrupted prefill is drained
    except BaseException as exc: => except KeyboardInterrupt as exc:
the_device_failed_while_idle: a device that failed before is told as any error is
    raise Unquiet(f"the device failed before this prefill: {broken}") from broken => raise
"""

_CLASSES: Final = (DeviceCarrier, CudaEngine, TakenCache)

MUTANTS: Final = read_mutants(_BUGS, {each.__name__: each for each in _CLASSES})
