"""What was measured, drawn and written so that others can check it."""
