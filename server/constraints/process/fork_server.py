"""A process that forks a child for each socket it receives, and reports how each child ends."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from server.constraints.process.wire import Answer, write_answer

PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl

Serve = Callable[[socket.socket], None]


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, even if this process is stopped or busy. If the parent has ended already, end
    this process now."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent has ended already


class ForkServer:
    """Forks a child for each socket received over `control`. A child is killed when the other end of its socket is closed. When a child
    ends by itself, the fork server writes `Answer.ENDED` to the child's socket."""

    def __init__(self, control: socket.socket, serve: Serve) -> None:
        self._control = control
        self._serve = serve
        self._children: dict[int, socket.socket] = {}
        self._poll = select.poll()

    def run(self) -> None:
        """Serve until `control` is closed. The children end with this process."""
        wakened, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll.register(wakened, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)
        is_open = True
        while is_open:
            ready = {fd for fd, _ in self._poll.poll()}
            # The socket of a child is ready only if its other end is closed: kill the child. Do this before other sockets are closed or
            # received, because the number of a closed descriptor may be reused at once.
            for fd in ready - {wakened, self._control.fileno()}:
                self._kill(fd)
            if self._control.fileno() in ready:
                is_open = self._receive()
            if wakened in ready:
                os.read(wakened, 4096)
                self._reap()

    def _receive(self) -> bool:
        """Fork a child for the next socket. If no child can be forked, close the socket, which tells the other end that the child is lost.
        Return False if no more sockets will come."""
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            return False
        if not message:
            return False
        if not fds:  # this process has no free descriptor, so the kernel has closed the socket: the other end sees that the child is lost
            print("no process for a constraint: too many are open", file=sys.stderr)
            return True
        sock = socket.socket(fileno=fds[0])
        own_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            print(f"cannot fork a process for a constraint: {error}", file=sys.stderr)
            sock.close()  # tells the other end that the child is lost
            return True
        if pid == 0:
            _become(sock, self._serve, own_pid)
        self._children[pid] = sock
        self._poll.register(sock, 0)  # report only the close of the other end
        return True

    def _kill(self, fd: int) -> None:
        """Kill the child of a socket."""
        self._poll.unregister(fd)
        for pid, sock in self._children.items():
            if sock.fileno() == fd:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Report how children have ended, and forget them."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                sock = self._children.pop(pid)
                with suppress(KeyError):
                    self._poll.unregister(sock)
                with suppress(OSError):
                    sock.setblocking(False)  # never block here: the child may have filled the socket's buffer
                    write_answer(sock, Answer.ENDED, number=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)
                sock.close()


def _become(sock: socket.socket, serve: Serve, parent_pid: int) -> NoReturn:
    """In a new child: close the descriptors that it has from the parent, except standard output and standard error, tell the worker the
    child's pid, and serve. Then end the child, with status 0 if it has served to the end or answered TOO_LARGE, and otherwise with 1."""
    status = 1
    try:
        die_with(parent_pid)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(sock.fileno(), 0)
        os.closerange(3, 1 << 20)
        own = socket.socket(fileno=0)
        write_answer(own, Answer.BORN, number=os.getpid())
        try:
            serve(own)
        except MemoryError:
            write_answer(own, Answer.TOO_LARGE)
        status = 0
    except ConnectionError:
        pass  # the worker has closed the connection
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
