"""Tests that need a real device; each is skipped, with its reason, where there is none."""
