"""One command per claim. Each writes raw rows with stamps; ratios are taken within one run."""
