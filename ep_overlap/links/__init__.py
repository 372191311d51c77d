"""Links: process groups that measure, and pace, CPU ranks' collectives; worlds of one real rank."""
