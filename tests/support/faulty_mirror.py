"""File system for mirrors (faulty:///path) that adds faults to the local disk.

    PATH.faults     JSON file with put_seconds (delay per file), errno (error for every write, such as ENOSPC),
                    hangs (writes hang) and garbles (changes one byte of every uploaded file)

Import this module to register the file system.
"""

import errno
import json
import os
import time
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


class FaultyFileSystem(LocalFileSystem):
    """Local file system with faults from the nearest `.faults` file next to one of the path's parent folders."""

    protocol = ("faulty", "local")

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("faulty://"))

    def strike(self, path: str) -> dict:
        path = self._strip_protocol(path)
        while True:
            beside = (p.with_name(p.name + ".faults") for p in Path(path).parents if p.name)
            faults = next((file for file in beside if file.exists()), None)
            found = json.loads(faults.read_text()) if faults else {}
            if not found.get("hangs"):
                break
            time.sleep(0.05)
        time.sleep(found.get("put_seconds", 0.0))
        if name := found.get("errno"):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
        return found

    def put_file(self, path1, path2, callback=None, **named):
        found = self.strike(path2)
        super().put_file(path1, self._strip_protocol(path2), **named)
        if found.get("garbles"):
            with open(self._strip_protocol(path2), "r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))

    def pipe_file(self, path, value, **named):
        self.strike(path)
        super().pipe_file(path, value, **named)


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
