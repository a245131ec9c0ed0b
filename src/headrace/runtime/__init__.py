"""The only code that does I/O and knows the protocol: processes, channels, slabs, turns."""
