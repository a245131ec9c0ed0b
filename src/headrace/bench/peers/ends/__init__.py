"""The two ends of one transport, each run as a process of its own in a peer's environment.

A worker is started as `INTERPRETER -m ends.worker` with the directory above this one on its path,
since a peer's environment holds neither headrace nor what headrace needs. So everything here needs
the standard library and the one package that it measures, and imports its neighbours by relative
names only.
"""
