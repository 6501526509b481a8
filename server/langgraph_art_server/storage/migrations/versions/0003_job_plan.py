"""Jobs are of two kinds, and keep the packing plan that they were computed with."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; the jobs of before are submissions, and those still open get a plan when they are taken up."""
    op.add_column("jobs", sa.Column("kind", sa.String(), nullable=False, server_default="train"))
    op.add_column("jobs", sa.Column("token_budget", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("checkpointing", sa.Boolean(), nullable=True))


def downgrade() -> None:
    """Drop them, and the jobs that only they can describe."""
    op.execute("DELETE FROM jobs WHERE kind <> 'train'")
    with op.batch_alter_table("jobs") as batch_op:
        batch_op.drop_column("checkpointing")
        batch_op.drop_column("token_budget")
        batch_op.drop_column("kind")
