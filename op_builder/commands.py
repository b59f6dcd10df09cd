"""The values that pass between the rooms that look for compilers and the one that runs commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Completed:
    """What a command answered.

    Attributes:
        returncode: exit status; -1 where the command did not start or was stopped.
        stdout: its standard output.
        stderr: its standard error.
        why: why it did not start, or that it took too long; ``""`` for a command that ended by itself.
    """

    returncode: int
    stdout: str = ""
    stderr: str = ""
    why: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran and succeeded."""
        return self.returncode == 0 and not self.why

    @property
    def output(self) -> str:
        """Both streams, standard output first."""
        return self.stdout + self.stderr


# Runs a command line to its end; tests pass a fake that answers from a table.
Run = Callable[[Sequence[str]], Completed]


@dataclass(frozen=True)
class Problem:
    """A tool that is missing or of no use, in the three parts of our errors: what, why, fix."""

    what: str
    why: str
    fix: str
