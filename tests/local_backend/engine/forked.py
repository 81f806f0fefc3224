"""Forks a process in which a chat model was used, in each of several states.

Prints one line for each child: what it answered or the error it got. The parent answers as before.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

from local_backend import ChatLocal
from tests.tiny import tiny_chat

QUESTION = "How can I bake bread at home?"
_CHILD_SECONDS = 60


def child(answer: Callable[[], object]) -> None:
    """Run ``answer`` in a child; a child that hangs is ended and says so."""
    pid = os.fork()
    if pid == 0:
        try:
            print(f"child: {answer()!r}", flush=True)
        except RuntimeError as error:
            print(f"child: {error!r}", flush=True)
        os._exit(0)
    deadline = time.monotonic() + _CHILD_SECONDS
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            print("child: hung", flush=True)
            return
        time.sleep(0.01)


def idle(chat: ChatLocal) -> None:
    child(lambda: chat.invoke(QUESTION).text)
    child(lambda: asyncio.run(chat.ainvoke(QUESTION)).text)
    child(lambda: "".join(chunk.text for chunk in chat.stream(QUESTION)))


def busy(chat: ChatLocal) -> None:
    """Forks at any moment of answers that other threads wait for, some with references."""
    done = threading.Event()

    def ask(number: int) -> None:
        while not done.is_set():
            texts = [f"{QUESTION} {number} {time.monotonic()}"]
            asyncio.run(chat.ainvoke(texts[0], references=texts))
            chat.invoke(texts[0], references=texts)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        child(lambda: chat.invoke(QUESTION, references=[QUESTION]).text)
    done.set()
    for thread in threads:
        thread.join()


def streaming(chat: ChatLocal) -> None:
    """Forks in the middle of a stream, which the child goes on to read."""
    pieces = iter(chat.stream(QUESTION))
    begun = next(pieces).text
    child(lambda: "".join(piece.text for piece in pieces))
    child(lambda: chat.invoke(QUESTION).text)
    rest = "".join(piece.text for piece in pieces)
    print(f"parent: {begun + rest!r}", flush=True)


def locked(chat: ChatLocal) -> None:
    """Forks while another thread holds the locks of the inbox and of the references."""
    locks = [chat.engine._intake._lock, chat.engine._make_row._reference_tokens._lock]
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        is_held.set()
        may_end.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child(lambda: chat.invoke(QUESTION, references=[QUESTION]).text)
    may_end.set()
    thread.join()


def closed(chat: ChatLocal) -> None:
    other = tiny_chat()
    other.invoke(QUESTION)
    other.close()
    child(lambda: other.invoke(QUESTION).text)
    child(chat.close)
    child(lambda: chat.invoke(QUESTION).text)


if __name__ == "__main__":
    for state in (idle, busy, streaming, locked, closed):
        print(f"state: {state.__name__}", flush=True)
        with tiny_chat("reference_copy") as used:
            print(f"parent: {used.invoke(QUESTION).text!r}", flush=True)
            state(used)
            print(f"parent: {used.invoke(QUESTION).text!r}", flush=True)
