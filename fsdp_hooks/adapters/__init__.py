"""Other cores behind the same ``RootLifecycle``: one file each, which imports that core."""
