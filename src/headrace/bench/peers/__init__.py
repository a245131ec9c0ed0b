"""The same bytes from one process into reserved memory of another, by headrace and by its peers.

`runner` goes through transports, sizes and rounds; `handoff` is headrace itself, `pair` the two
worker processes of a peer, whose ends are in `ends`.
"""
