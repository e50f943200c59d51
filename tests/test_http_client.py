"""The HTTP client on real sockets."""

from __future__ import annotations

import asyncio

from agentguard.engines import http


async def test_an_idle_connection_is_given_up_before_the_server_closes_it() -> None:
    """The server resets a connection that is used again after its keep-alive time, as one does that is just closing it."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        answered = asyncio.get_running_loop().time()
        while await reader.readuntil(b"\r\n\r\n"):
            if asyncio.get_running_loop().time() - answered > http.KEEPALIVE_S:
                writer.transport.abort()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            answered = asyncio.get_running_loop().time()

    async def forgiving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.IncompleteReadError:  # the client closed the connection
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(forgiving, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname())
    async with http.http_client(url, timeout=5) as client:
        for pause in (0.0, 0.0, http.KEEPALIVE_S + 0.2):
            await asyncio.sleep(pause)
            assert (await client.get("/")).text == "ok"
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)
    assert connections == 2, "the second request went over the first one's connection, the third did not"
