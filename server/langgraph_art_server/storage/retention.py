"""Lets calls go that nobody submits: chats of an app in use, runs that failed, experiments.

Invariant: what a submission named is never deleted for its age.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from langgraph_art_server.storage.calls import CallStore

log = logging.getLogger(__name__)

_PERIOD = 3600.0


async def expire_unclaimed(calls: CallStore, keep: timedelta) -> None:
    """Delete what is older than ``keep``, now and every hour, until cancelled."""
    while True:
        try:
            if count := await asyncio.to_thread(calls.expire, datetime.now(UTC) - keep):
                log.info("deleted %d recorded calls that no submission claimed in %s", count, keep)
        except SQLAlchemyError:
            log.exception("old calls could not be deleted; trying again in an hour")
        await asyncio.sleep(_PERIOD)
