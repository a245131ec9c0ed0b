"""What headrace knows of vLLM's cache: its geometry, its blocks, and a prefill as it is computed.

These modules are given vLLM's objects and import nothing of vLLM's.
"""
