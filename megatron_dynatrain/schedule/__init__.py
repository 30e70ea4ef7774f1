"""When to switch to which layout: the schedule file, what it means for a job, and whether it fits (pure)."""
