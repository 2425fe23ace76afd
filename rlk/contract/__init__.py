"""What must be equal, and in which order it is computed. Plain data and pure functions; imports nothing of rlk and no torch."""
