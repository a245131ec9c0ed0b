"""A proxy in front of vLLM decoders whose prefill sources hang under them."""
