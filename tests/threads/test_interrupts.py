"""SIGINT is delayed during work that must not be interrupted, and never lost."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from tinker_lightning.threads.background import sigint_held


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_it_waits_for_the_end_of_the_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with sigint_held():
            ctrl_c()
            ctrl_c()
            done.append("the block")
        done.append("what follows")
    assert done == ["the block"]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_a_custom_handler_is_called_once_and_stays() -> None:
    came: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(signal.getsignal(signal.SIGINT)))
    mine = signal.getsignal(signal.SIGINT)
    try:
        with sigint_held():
            ctrl_c()
            assert came == []
        assert came == [mine]
        with sigint_held():
            pass
        assert came == [mine]
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_the_block_raises_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), sigint_held():
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt) as raised, sigint_held():  # noqa: PT012
        ctrl_c()
        _ = 1 / 0
    assert isinstance(raised.value.__context__, ZeroDivisionError)


def test_ignored_interrupts_stay_ignored_and_other_threads_have_none() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with sigint_held():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    done: list[int] = []

    def elsewhere() -> None:
        with sigint_held():
            done.append(1)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [1]
