"""The pair suite: one source and one decoder, real processes, real devices.

This file imports nothing: the source's side of the suite runs in a vendor's environment.
"""
