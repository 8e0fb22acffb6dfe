"""Handing a pool's descriptor to another process over a Unix socket (SCM_RIGHTS)."""

import os
import socket

from ._attach import AttachedPool
from ._base import Pool
from ._errors import PoolError

_MAGIC = b"lf-memory pool 1"
_MAX_FDS = 8  # taken from one message, so that what a stranger sends too much can be closed


def send_pool(sock: socket.socket, pool: Pool, *, writable: bool = False) -> None:
    """Send a pool's memory to the process at the other end of a Unix socket; `recv_pool` there.

    Without `writable` the descriptor is opened anew for reading only. PoolError if the socket or the pool is not
    one, OSError if it is not connected.
    """
    _require_unix(sock)
    if not isinstance(pool, Pool):
        raise PoolError(f"send_pool needs a HostPool or VariablePool, not {type(pool).__name__}")
    if writable:
        socket.send_fds(sock, [_MAGIC], [pool.fd])
        return
    fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        socket.send_fds(sock, [_MAGIC], [fd])
    finally:
        os.close(fd)


def recv_pool(sock: socket.socket, *, max_bytes: int, writable: bool = False) -> AttachedPool:
    """The pool that `send_pool` sent from the other end; blocks as the socket's timeout says.

    Nothing the sender says is believed: PoolError for another message, no or several descriptors, one that is not a
    sealed pool, sizes that contradict each other, and more than `max_bytes`. Descriptors are closed then.
    """
    _require_unix(sock)
    message, fds, flags, _ = socket.recv_fds(sock, len(_MAGIC), _MAX_FDS)
    try:
        if message != _MAGIC:
            raise PoolError(f"received {message!r}, expected {_MAGIC!r}: the sender is not send_pool")
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise PoolError(f"received {len(fds)} descriptors with the pool, expected 1")
        size = os.fstat(fds[0]).st_size
        if size > max_bytes:
            raise PoolError(
                f"the pool has {size} bytes, more than max_bytes", needed=size, available=max_bytes
            )
        return AttachedPool(fds[0], writable=writable)
    finally:
        for fd in fds:
            os.close(fd)


def _require_unix(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        raise PoolError(f"descriptors travel over Unix sockets only, not {sock.family.name}")
