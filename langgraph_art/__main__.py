"""``python -m langgraph_art``: the same as the ``langgraph-art`` command."""

from langgraph_art.cli.main import app

app()
