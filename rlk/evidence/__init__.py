"""What a run leaves behind: byte comparisons, records, provenance, environment, run directory, report."""
