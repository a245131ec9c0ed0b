"""The device check: what a GPU has to show, in one folder and under ten minutes.

`scripts/device_check.sh` runs it. `plan` says what is done at what size and how long it may take,
`runner` does the steps one after another, each in a process of its own, `steps` has one module for
each, and `summary` holds the rows against the goals. On the fake device (`--fake`) the same code
runs at tiny sizes: that shows that the check works, and nothing about a device.
"""
