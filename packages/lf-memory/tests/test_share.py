"""send_pool and recv_pool: a pool over a Unix socket, and what a receiver must not believe."""

import fcntl
import os
import socket
import subprocess
import sys

import pytest

from lf_memory import HostPool, PoolError, VariablePool, recv_pool, send_pool

MIB = 1 << 20
MAGIC = b"lf-memory pool 1"


@pytest.fixture
def pair():
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        yield one, two


def memfd(name, size, seals=fcntl.F_SEAL_SHRINK):
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_the_receiver_sees_the_slots(pair):
    pool = HostPool(10_000, 4)
    lease = pool.acquire()
    lease.array[:] = 5
    send_pool(pair[0], pool)
    view = recv_pool(pair[1], max_bytes=MIB)
    assert (view.slots, view.slot_bytes) == (4, 10_000)
    assert (view.slot(lease.index) == 5).all()
    with pytest.raises(ValueError, match="read-only"):
        view.slot(0)[0] = 1


def test_a_variable_pool_is_read_by_offset(pair):
    pool = VariablePool(MIB)
    pool.acquire(5000)
    lease = pool.acquire(70_000)
    lease.array[:] = 6
    send_pool(pair[0], pool)
    assert (recv_pool(pair[1], max_bytes=MIB).part(lease.offset, 70_000) == 6).all()


def test_writing_needs_the_consent_of_both_ends(pair):
    pool = HostPool(64, 1)
    send_pool(pair[0], pool)
    with pytest.raises(PoolError, match="cannot be mapped"):
        recv_pool(pair[1], max_bytes=MIB, writable=True)
    send_pool(pair[0], pool, writable=True)
    recv_pool(pair[1], max_bytes=MIB, writable=True).slot(0)[:] = 8
    assert (pool.acquire().array == 8).all()


def test_another_process_receives_the_pool(tmp_path):
    path = str(tmp_path / "socket")
    code = f"""
import socket
from lf_memory import recv_pool
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect({path!r})
    view = recv_pool(sock, max_bytes=1 << 20)
    sock.sendall(bytes(view.slot(0)[:4]))
"""
    pool = HostPool(64, 1)
    pool.acquire().array[:4] = 1, 2, 3, 4
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        child = subprocess.Popen([sys.executable, "-c", code])
        connection, _ = server.accept()
        with connection:
            send_pool(connection, pool)
            assert connection.recv(4) == bytes([1, 2, 3, 4])
    assert child.wait() == 0


def test_more_bytes_than_the_receiver_allows_are_refused(pair, open_fds):
    before, fd = open_fds(), memfd("lf-memory-4096-4096", 1 << 45)
    socket.send_fds(pair[0], [MAGIC], [fd])
    os.close(fd)
    with pytest.raises(PoolError, match="more than max_bytes") as caught:
        recv_pool(pair[1], max_bytes=MIB)
    assert (caught.value.needed, caught.value.available) == (1 << 45, MIB)
    assert open_fds() == before


@pytest.mark.parametrize(("name", "size", "seals"), [
    ("lf-memory-4096-4096", 0, fcntl.F_SEAL_SHRINK),
    ("lf-memory-999999-4096", 8192, fcntl.F_SEAL_SHRINK),
    ("lf-memory-1-999424", 8192, fcntl.F_SEAL_SHRINK),
    ("lf-memory-4096-4096", 8192, 0),
    ("other", 8192, fcntl.F_SEAL_SHRINK),
])  # fmt: skip
def test_sizes_and_seals_that_lie_are_refused(pair, open_fds, name, size, seals):
    before, fd = open_fds(), memfd(name, size, seals)
    socket.send_fds(pair[0], [MAGIC], [fd])
    os.close(fd)
    with pytest.raises(PoolError, match=r"do not fit|not sealed|not the memory"):
        recv_pool(pair[1], max_bytes=MIB)
    assert open_fds() == before


@pytest.mark.parametrize(
    ("message", "fds"), [(b"GET / HTTP/1.1\r\n", 1), (b"short", 1), (MAGIC, 0), (MAGIC, 2)]
)
def test_another_message_is_refused_and_its_descriptors_are_closed(pair, open_fds, message, fds):
    pool = HostPool(64, 1)
    before = open_fds()
    socket.send_fds(pair[0], [message], [pool.fd] * fds)
    with pytest.raises(PoolError, match="expected"):
        recv_pool(pair[1], max_bytes=MIB)
    assert open_fds() == before


def test_a_file_and_a_pipe_are_refused(pair, tmp_path):
    with open(tmp_path / "f", "wb+") as file:
        file.truncate(8192)
        read, write = os.pipe()
        for fd in (file.fileno(), read):
            socket.send_fds(pair[0], [MAGIC], [fd])
            with pytest.raises(PoolError, match="not the memory of a pool"):
                recv_pool(pair[1], max_bytes=MIB)
        os.close(read)
        os.close(write)


def test_a_sender_that_hangs_up_is_reported(pair):
    pair[0].close()
    with pytest.raises(PoolError, match="received b''"):
        recv_pool(pair[1], max_bytes=MIB)


def test_other_sockets_and_other_objects_are_refused(pair):
    with socket.socket(socket.AF_INET) as sock:
        with pytest.raises(PoolError, match="Unix sockets only, not AF_INET"):
            send_pool(sock, HostPool(64, 1))
        with pytest.raises(PoolError, match="Unix sockets only"):
            recv_pool(sock, max_bytes=MIB)
    with pytest.raises(PoolError, match="not bytes"):
        send_pool(pair[0], b"pool")
