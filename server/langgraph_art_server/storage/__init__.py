"""Storage: one SQLite database (WAL) for records, with migrations; checkpoints are directories beside it."""
