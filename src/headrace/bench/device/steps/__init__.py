"""The steps of the device check: each module's `run(place, step, say)` does one of them."""
