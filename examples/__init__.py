"""Programs to run and read; ``demo.py`` is what ``make demo`` shows."""
