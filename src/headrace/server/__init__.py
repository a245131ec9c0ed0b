"""An OpenAI-compatible endpoint over owner processes, with metrics and a page."""
