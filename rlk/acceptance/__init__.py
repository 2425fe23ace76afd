"""The judge: cell matrix, pytest plugin, verdict. It never imports an engine."""
