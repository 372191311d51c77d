"""Models that give the schedule their parts."""
