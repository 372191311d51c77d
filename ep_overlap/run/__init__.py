"""The schedule executed: nodes, the runner, and the trace of what ran when."""
