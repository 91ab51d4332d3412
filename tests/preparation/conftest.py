"""Python server that has imported prepare_data.py's modules and forks for each run, to save import time."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from support.prepared import KILLED
from support.project import ROOT

SERVER = """
import json, os, sys, tempfile
import gigatoken, psutil, tokenizers
import prepare_data
from pretrain_tools.preparation import prepare, request
from pretrain_tools.preparation.cleaning import folded_words
code = sys.argv.pop(1)
for line in sys.stdin:
    reader, writer = os.pipe()
    errors = tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        os.dup2(errors.fileno(), 2)
        os.close(reader)
        os.close(writer)
        sys.argv = ["-c", *json.loads(line)]
        exec(code)
    os.close(writer)
    # Ends when the workers have ended, too.
    with open(reader) as output:
        printed = output.read()
    returncode = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    errors.seek(0)
    print(json.dumps({"returncode": returncode, "stdout": printed, "stderr": errors.read()}), flush=True)
"""


@pytest.fixture(scope="session")
def run_killed():
    """Returns a function that runs prepare_data.py, kills it at the given moment (see support.prepared.KILLED; 0:
    never) and returns the result."""
    command = [sys.executable, "-c", SERVER, KILLED]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(at, *arguments):
            server.stdin.write(json.dumps([str(at), *map(str, arguments)]) + "\n")
            server.stdin.flush()
            return SimpleNamespace(**json.loads(server.stdout.readline()))

        yield run
        server.stdin.close()
