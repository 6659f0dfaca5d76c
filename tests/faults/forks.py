"""Processes that are forked for one case: their end is told by a line through a pipe."""

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Final

from shardspec import ShardSpecError

__all__ = ["DONE", "KILLED", "Fork"]

DONE: Final = "done"
KILLED: Final = "killed"


class Fork:
    """A process that does one thing and ends.

    Parameters
    ----------
    act
        What it does.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(read)
            self._live(act, write)
        os.close(write)
        self._pipe = read
        self._ended = False

    def _live(self, act: Callable[[], object], pipe: int) -> None:
        story = DONE
        try:
            signal.alarm(0)
            act()
        except ShardSpecError as error:
            story = f"Error: {error}\n"
        except BaseException:
            story = f"Traceback: {traceback.format_exc(limit=-6, chain=False)}"
        finally:
            try:
                _write(pipe, story.encode())
            finally:
                os._exit(0)

    def kill(self) -> None:
        """Kill it."""
        os.kill(self._pid, signal.SIGKILL)

    def end(self) -> str:
        """Wait for it; return DONE, KILLED, or the error that it ended with."""
        try:
            with open(self._pipe, "rb") as pipe:
                story = pipe.read().decode()
        except BaseException:
            self.kill()
            raise
        finally:
            os.waitpid(self._pid, 0)
        return story or KILLED


_write: Final = os.write
"""The system's own: cases put others in its place."""


def after(seconds: float) -> None:
    """Wait."""
    time.sleep(seconds)
