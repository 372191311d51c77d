"""The schedule as data: actions, orders, passes, checks. Imports no torch."""
