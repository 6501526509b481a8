"""The `langgraph-art` command; one file for each subcommand that is more than a few lines."""
