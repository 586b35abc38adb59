"""The two ends of the measurement of a link between machines."""

import logging
from collections.abc import Callable
from functools import partial

from planaria.core.machine_messages import (
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
)
from planaria.transport.link_measurement import measure_link, serve_measurement
from planaria.transport.sockets import listening_socket

logger = logging.getLogger(__name__)


def serve_link(host: str, secret: bytes) -> tuple[LinkServed, Callable[[], None]]:
    """The port at which another machine can measure the link to this one.

    Returns:
        What the head is told, and what has to run in a thread meanwhile, up to some seconds.
    """
    try:
        listener = listening_socket(host)
    except OSError as error:
        logger.warning("no link can be measured: %s", error)
        return LinkServed(0), lambda: None
    served = LinkServed(listener.getsockname()[1])
    return served, partial(serve_measurement, listener, secret)


def measured_link(request: LinkMeasureRequested) -> LinkMeasured:
    """The link to a machine that serves the measurement. Blocks for about half a second."""
    try:
        return LinkMeasured(link=measure_link(request.address, request.secret))
    except ConnectionError as error:
        return LinkMeasured(reason=str(error))
