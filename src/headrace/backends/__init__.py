"""The two contracts that a device implements, and one file per device."""
