"""Sans-IO state machines: they take messages and completions in and give commands out.

No machine here holds a clock, a tensor or a socket. Time comes in as an argument, bytes as ranges.
"""
