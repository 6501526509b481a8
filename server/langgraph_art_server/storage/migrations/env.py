"""Runs the migrations on the connection that the server hands over; there is no offline mode."""

from alembic import context

from langgraph_art_server.storage.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter a column in place; Alembic then copies the table.
    render_as_batch=True,
    # A migration is whole or absent, also when the process is killed in the middle.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
