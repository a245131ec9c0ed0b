"""A module that cannot be imported."""

raise KeyError("what it needs")
