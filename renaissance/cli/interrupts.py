"""What Ctrl-C does before ``run_command`` is there to catch it; ``renaissance.cli.quiet_start`` says for whom."""

from __future__ import annotations

import signal
import threading


def end_quietly() -> None:
    """Let SIGINT end the process by itself, unless somebody has other plans for it."""
    if _ours_to_set() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _quiet.append(True)


def raise_again() -> None:
    """Let SIGINT be a KeyboardInterrupt again, if ``end_quietly`` changed that."""
    if _ours_to_set() and _quiet and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _quiet.clear()


def _ours_to_set() -> bool:
    return threading.current_thread() is threading.main_thread()  # Python sets handlers in no other


_quiet: list[bool] = []
