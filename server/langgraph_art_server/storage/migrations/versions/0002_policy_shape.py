"""Policies know which layers they adapt and which base model they belong to."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; the first server that opens the policies of before is taken for their base model's."""
    op.add_column("policies", sa.Column("targets", sa.JSON(), nullable=True))
    op.add_column("policies", sa.Column("base_model", sa.String(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    with op.batch_alter_table("policies") as batch_op:
        batch_op.drop_column("base_model")
        batch_op.drop_column("targets")
