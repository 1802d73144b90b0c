"""What becomes of an exception that nobody expected: the end of the one request that it concerns, and a log entry."""

from __future__ import annotations

import logging

from rest_local.errors import RestLocalError, Unexpected

log = logging.getLogger("rest_local.faults")


def of_request(error: Exception) -> RestLocalError:
    """What the owner of the request is told. Errors of this program are told as they are, others are logged."""
    if isinstance(error, RestLocalError):
        return error
    log.error("a request ends with an error that nobody expected", exc_info=error)
    told = Unexpected(error)
    told.__cause__ = error
    return told
