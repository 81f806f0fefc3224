"""Example programs; ``make demo`` runs ``demo.py``."""
