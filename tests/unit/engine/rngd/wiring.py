"""Which tensors of a checkpoint a family reads, for tests that hold it against a real one."""

from __future__ import annotations

from headrace.engine.rngd.family import Family


def tensors_read(family: Family, num_layers: int) -> set[str]:
    """The names of all tensors that arguments of the family's kernels can come from."""
    names = set(family.weights.values())
    return {name.format(layer=i, ended=i) for name in names for i in range(num_layers)}
