"""Who listens on a port: the server that was meant, or another one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentguard.proxy.listeners import held_by_group, listeners

SERVER = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


def test_our_own_socket_is_ours_until_it_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert [one.uid for one in listeners(port)] == [os.getuid()]
        assert held_by_group(port, os.getpgid(0))
    assert listeners(port) == []
    assert not held_by_group(port, os.getpgid(0))


def test_a_childs_socket_belongs_to_its_own_group() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    with child:
        port = int(child.stdout.readline())
        assert held_by_group(port, child.pid)
        assert not held_by_group(port, os.getpgid(0))
        child.communicate("\n")


def test_an_ipv6_socket_counts() -> None:
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        assert len(listeners(server.getsockname()[1])) == 1


def test_where_the_system_does_not_tell_nothing_is_claimed(tmp_path: Path) -> None:
    assert listeners(80, tmp_path) == []
    assert held_by_group(80, 1, tmp_path)
