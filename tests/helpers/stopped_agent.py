"""An agent that stands still before it does anything, in one of a job's nodes."""

import os
import signal

import msgspec

from planaria.core.specs import NodeSpec
from planaria.nodes import agent

NODE = 1


def main(payload: bytes, lifeline_fd: int) -> None:
    """Is called in the agent's process, as the real main function would be."""
    if msgspec.json.decode(payload, type=NodeSpec).node == NODE:
        os.kill(os.getpid(), signal.SIGSTOP)
    agent.main(payload, lifeline_fd)
