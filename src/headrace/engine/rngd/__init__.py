"""Layer-group prefill on FuriosaAI's RNGD kernels: runs in the vendor's environment, on a card or
emulated on a CPU, and knows no protocol.
"""
