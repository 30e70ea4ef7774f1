"""Who sends what to whom, in which windows, and what it costs: pure."""
