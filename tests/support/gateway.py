"""Forwards connections to another local port, and kills itself with SIGKILL in the middle of an upload.

Arguments: own port, target port, and part of the name of the object whose upload is interrupted.
"""

import asyncio
import os
import signal
import sys
from asyncio import StreamReader, StreamWriter

PORT, BEHIND = int(sys.argv[1]), int(sys.argv[2])
DIES_AT = b"".join(name.encode() for name in sys.argv[3:])


async def forward(source: StreamReader, target: StreamWriter) -> None:
    is_last = False
    while content := await source.read(1 << 16):
        body = content if is_last else content.partition(b"\r\n\r\n")[2]
        is_last = is_last or (bool(DIES_AT) and content.startswith(b"PUT ") and DIES_AT in content.split(b"\r\n")[0])
        if is_last and body:  # the body may arrive after the headers
            target.write(content[: -len(body) // 2])
            await target.drain()
            os.kill(os.getpid(), signal.SIGKILL)
        target.write(content)
        await target.drain()
    target.close()


async def connect(client: StreamReader, to_client: StreamWriter) -> None:
    server, to_server = await asyncio.open_connection("127.0.0.1", BEHIND)
    await asyncio.gather(forward(client, to_server), forward(server, to_client), return_exceptions=True)


async def serve() -> None:
    server = await asyncio.start_server(connect, "127.0.0.1", PORT)
    print("listening", flush=True)
    await server.serve_forever()


asyncio.run(serve())
