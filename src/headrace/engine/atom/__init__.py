"""Rebellions' ATOM as a decoder. It runs in the vendor's own environment, on one thread, and knows
no protocol.
"""
