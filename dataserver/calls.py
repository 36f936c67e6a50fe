"""Calls from other threads into an event loop, which runs them one after the other."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dataserver.shared import create_eventfd, drain, notify
from renaissance.core.errors import DataServerError

_T = TypeVar("_T")


class CallQueue:
    """``event`` is readable while calls wait; whoever polls it then calls ``run``."""

    def __init__(self) -> None:
        self.event = create_eventfd()
        self._calls: deque[tuple[Callable[[], object], Future[object]]] = deque()
        self._lock = threading.Lock()
        self._accepting = True

    def call(self, function: Callable[[], _T]) -> _T:
        """Have ``function`` run by the loop and return its result, or raise what it raised; for other threads."""
        future: Future[object] = Future()
        with self._lock:
            if not self._accepting:
                raise DataServerError("the dataserver is stopping")
            self._calls.append((function, future))
        notify(self.event)
        return future.result()  # type: ignore[return-value]

    def run(self) -> None:
        """In the loop's thread: everything that waits."""
        drain(self.event)
        while self._calls:  # appended by other threads, popped here only
            function, future = self._calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def refuse(self) -> None:
        """From now on ``call`` raises; calls that wait already are answered."""
        with self._lock:
            self._accepting = False
        self.run()

    def close(self) -> None:
        os.close(self.event)
