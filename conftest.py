"""Loads the acceptance plugin where the package is not installed; an installed rlk registers it by entry point."""
