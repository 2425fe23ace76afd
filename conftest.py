"""Loads the acceptance plugin where the package is not installed; an installed rlk registers it by entry point, under the same name."""

pytest_plugins = ["rlk.acceptance.plugin"]
