"""What people look at: the timeline picture, the bench table, the doctor's list."""
