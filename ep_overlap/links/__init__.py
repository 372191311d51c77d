"""Links between CPU ranks: process groups that measure, and on demand pace, every collective."""
