"""Processes that are ranks: started for a command, kept warm for tests, on a shaped link."""
