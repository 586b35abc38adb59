"""Where machines come from: whoever is asked for one in place of a lost one, or what is wrong with
one on which something has failed.

    slurm         slurm_platform.py
    kubernetes    kubernetes_platform.py
    any other     a command for a shell, which asks whoever has machines; it finds the lost machine
                  in $PLANARIA_LOST_NAME and $PLANARIA_LOST_HOST, in $PLANARIA_LOST_WHY whether it
                  is "lost", "leaving" or "unfit", and in $PLANARIA_HEAD the HOST:PORT at which
                  agents join

Ray needs none of these: it starts a lost actor anew by itself, and asks its autoscaler for room.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, Protocol

from planaria.nodes.child_answers import program_result

OPTION: Final = "--operator"
REQUEST_TIMEOUT_S: Final = 60.0
TEXT_CHARACTERS_MAX: Final = 300  # Of what a platform says.


@dataclass(frozen=True, slots=True)
class LostMachine:
    """A machine that the job has lost, or that is being taken away.

    Attributes:
        name: its name in Slurm or Kubernetes, else its host name.
        host: address at which others reached it.
        is_leaving: whether it was told to leave, so that its scheduler knows of it already.
        is_unfit: whether it is unfit for a node, so that its node leaves.
        lost_s: time by the monotonic clock at which its loss was told.
    """

    name: str
    host: str
    is_leaving: bool
    is_unfit: bool = False
    lost_s: float = field(default=-inf, compare=False)


class Platform(Protocol):
    """Where machines come from."""

    def ask_for_machine(self, lost: LostMachine) -> str:
        """Asks for a machine in place of a lost one; returns what was done, in words.

        Blocks until the platform has taken the request, at most a minute or two.

        Raises:
            OSError: it was refused, or not answered.
        """

    def verdict_on(self, name: str, host: str) -> str:
        """What the platform has against a machine, in words; "": nothing. Blocks likewise.

        Args:
            name, host: see LostMachine.

        Raises:
            OSError: the same.
        """

    def give_back(self, machine: LostMachine) -> str:
        """Gives an unfit machine back, which has no node of the job any more. Blocks likewise.

        Returns:
            What was done, or what a person is to do, in words; "": there is nothing to do.

        Raises:
            OSError: the same.
        """

    def cancel_requests(self) -> None:
        """Takes back what was asked for and is not granted yet. Blocks likewise.

        Raises:
            OSError: the same.
        """


class CommandPlatform:
    """A command that asks for a machine; see the head of this module."""

    def __init__(self, command: str, *, head: str, environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = {**environment, "PLANARIA_HEAD": head}

    def ask_for_machine(self, lost: LostMachine) -> str:
        """See Platform."""
        leaving = "unfit" if lost.is_unfit else "leaving"
        environment = {
            **self._environment,
            "PLANARIA_LOST_NAME": lost.name,
            "PLANARIA_LOST_HOST": lost.host,
            "PLANARIA_LOST_WHY": leaving if lost.is_leaving else "lost",
        }
        text = program_output(("/bin/sh", "-c", self._command), environment, what="the command")
        return text.partition("\n")[0] or "the command has asked for one"

    def verdict_on(self, name: str, host: str) -> str:
        """See Platform. `cluster.health_check` may ask whoever knows more."""
        del name, host
        return ""

    def give_back(self, machine: LostMachine) -> str:
        """See Platform. The command was told which machine is unfit."""
        del machine
        return ""

    def cancel_requests(self) -> None:
        """See Platform. A command cannot be asked to; agents find the job's end by themselves."""


def program_output(words: Sequence[str], environment: Mapping[str, str], *, what: str) -> str:
    """What a program writes to its standard output.

    Raises:
        OSError: it fails, or takes too long.
    """
    try:
        status, output, errors = program_result(
            words, timeout_s=REQUEST_TIMEOUT_S, environment=environment
        )
    except TimeoutError as error:
        raise TimeoutError(f"{what} got no answer in {REQUEST_TIMEOUT_S:g} s") from error
    if status:
        reason = (errors.strip() or output.strip())[-TEXT_CHARACTERS_MAX:]
        raise OSError(f"{what} ended with {status}: {reason}")
    return output.strip()
