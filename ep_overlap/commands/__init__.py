"""What the command line runs: flags, a model in training on its ranks, train and bench."""
