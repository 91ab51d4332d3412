"""A Python that has imported everything already, and forks for each script: most of a test's time would be imports.

The processes that run tests side by side share one such server. `WarmPopen` is `subprocess.Popen`, except that a
script of the project under this interpreter is forked from the server instead of started: same arguments, environment,
folder, files, sessions, signals and exit status. The launchers that it runs start their ranks in the same way. The
variables of the Hub are read anew after the fork.

What differs: after threads, exit functions and output the process is gone, where an interpreter takes its modules
apart for 0.4 s. And the parent is the server, so tests about launchers that die, or whose command line matters, take
`subprocess.Popen`; so do those about how an interpreter starts. Whoever changes a variable that is read during imports
gets a new interpreter by itself.
"""

import array
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import pkgutil
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOCKET, ENVIRONMENT = "WARM_PYTHON_SOCKET", "WARM_PYTHON_ENVIRONMENT"
READ_BY_IMPORTS = (
    "OMP_", "MKL_", "KMP_", "OPENBLAS", "ATEN_", "ONEDNN_", "DNNL_", "LD_", "PYTHON", "PATH", "TRANSFORMERS_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "TQDM_", "DS_", "MPL", "XDG_", "HOME", "TMPDIR",
    "TOKENIZERS_", "LANG", "LC_",
)  # fmt: skip
SET_BY_LIBRARIES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK",
    "TOKENIZERS_PARALLELISM", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""And by launchers, for those that they start. PYTHONPATH is read below; a machine that forks has no CUDA device."""
LIBRARIES = (
    "accelerate.commands.launch", "torch.distributed.run", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "matplotlib.pyplot",
    "datasets", "deepspeed", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "huggingface_hub", "psutil",
    "pretrain_tools.publishing.card", "pretrain_tools.planning.memory_advice",
)  # fmt: skip


ASKED_BY: list[int] = []
"""In a process that the server has forked: the process that asked for it."""


STARTED: list[int] = []
"""The file in which a server that was started will say that it is ready."""


def sizes_of_launch(words: list[str], folder: Path) -> dict[str, str]:
    """The sizes in a launcher's file that accelerate's launcher drops, as variables.

    A process reads them from that file, whose name is in the command line of the process that launched it; a forked
    one has the command line of the server.
    """
    file = folder / words[words.index("--config_file") + 1] if "--config_file" in words else folder
    text = file.read_text() if file.is_file() else ""
    if "parallelism_config" not in text:
        return {}
    sizes = {name: re.search(rf"parallelism_config_{name}_size: *(\S+)", text) for name in ("pp", "ep")}
    return {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": found[1] if found else "1" for name, found in sizes.items()}


class WarmPopen(subprocess.Popen):
    """subprocess.Popen whose process is forked from the server where that makes no difference."""

    takes_terminal = False
    """Whether Ctrl-C of the terminal on stdin reaches the process, which has a session of its own."""
    _connection: socket.socket | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        python = [str(part) for part in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        if preexec_fn or pass_fds or not can_be_forked(python, environment):
            begin = preexec_fn or self._begin
            return super()._execute_child(args, executable, begin, close_fds, pass_fds, cwd, env, *rest)
        environment = sizes_of_launch(python, Path(cwd or os.getcwd())) | environment
        # Of the rest: startupinfo, creationflags, shell, the six ends of the pipes, and what follows them.
        pipes, start_new_session = rest[3:9], rest[-2]
        files = [own if given == -1 else given for own, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            "arguments": python[1:],
            "environment": environment,
            "folder": str(cwd or os.getcwd()),
            "new_session": bool(start_new_session),
            "takes_terminal": self.takes_terminal,
            "starter": os.getpid(),
        }
        content = json.dumps(request).encode()
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect("\0" + server())
        socket.send_fds(self._connection, [len(content).to_bytes(8, "little")], files)
        self._connection.sendall(content)
        self.pid = int.from_bytes(self._connection.recv(8, socket.MSG_WAITALL), "little")
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None

    def _begin(self):
        """In a new interpreter, before it begins: what `serve` and `become` do in a forked one."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.takes_terminal:
            take_terminal()

    def _try_wait(self, wait_flags):
        if self._connection is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return (0, 0)
        return (self.pid, self._ended())

    def _internal_poll(self, _deadstate=None, **internals):
        if self._connection is None or self.returncode is not None:
            return super()._internal_poll(_deadstate, **internals)
        if select.select([self._connection], [], [], 0)[0]:
            self._handle_exitstatus(self._ended())
        return self.returncode

    def _ended(self) -> int:
        """The status as os.waitpid gives it; that of a process killed with SIGKILL if the server has died."""
        with self._connection:  # once it is closed, the server lets the process go
            status = self._connection.recv(8, socket.MSG_WAITALL)
        return int.from_bytes(status, "little") if status else signal.SIGKILL


class PopenInTerminal(WarmPopen):
    """Start it with a terminal as stdin and start_new_session."""

    takes_terminal = True


def take_terminal() -> None:
    """Makes the terminal on stdin that of this process's session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def starter() -> int:
    """The process that has started this one: the parent, or who asked the server."""
    return ASKED_BY[0] if ASKED_BY else os.getppid()


def can_be_forked(command: list[str], environment: dict[str, str]) -> bool:
    """Whether this is a script under this interpreter, with nothing changed that imports read."""
    if len(command) < 2 or command[0] != sys.executable or os.path.exists("/dev/nvidiactl"):
        return False  # CUDA, once it is asked what there is, does not survive a fork
    arguments = command[2:] if command[1] == "-u" else command[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        return False
    server()
    return json.loads(os.environ[ENVIRONMENT]) == read_by_imports(environment)


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}
    return {name: value for name, value in found.items() if name not in SET_BY_LIBRARIES}


def read_hub_variables() -> None:
    """As an import does: HF_ENDPOINT, HF_HOME and the others."""
    import datasets.config
    import transformers.dynamic_module_utils
    from huggingface_hub import constants, hf_api, hf_file_system

    for module in (constants, datasets.config):  # all others ask these
        importlib.reload(module)
    hf_api.api.endpoint = constants.ENDPOINT
    hf_file_system.HfFileSystem.clear_instance_cache()
    hf_file_system.hffs = hf_file_system.HfFileSystem()
    modules = os.environ.get("HF_MODULES_CACHE", os.path.join(constants.HF_HOME, "modules"))
    transformers.utils.hub.HF_MODULES_CACHE = transformers.dynamic_module_utils.HF_MODULES_CACHE = modules


def of_the_hub(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("HF_")}


def start_server() -> None:
    """Starts the server of this process and of those that inherit its environment; does not wait until it is ready."""
    address = f"groundwork-{os.getpid()}"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", SOCKET: address}
    environment[ENVIRONMENT] = json.dumps(read_by_imports(environment))
    ready, writer = os.pipe()
    command = [sys.executable, __file__, str(writer)]
    # Its end is ours: it watches its standard input, which closes when this process ends, in whichever way.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=[writer])
    os.close(writer)
    STARTED.append(ready)
    os.environ[SOCKET] = address
    os.environ[ENVIRONMENT] = environment[ENVIRONMENT]
    atexit.register(process.kill)


def server() -> str:
    """The address of the server, started by the first who asks."""
    if SOCKET not in os.environ:
        start_server()
    if STARTED:
        ready = STARTED.pop()
        is_ready = os.read(ready, 1)
        os.close(ready)
        if not is_ready:
            raise RuntimeError("the warm interpreter cannot import the project; see its traceback above")
    return os.environ[SOCKET]


def import_everything() -> None:
    sys.path.insert(0, str(ROOT))
    import pretrain

    kept = os.dup(1), os.dup(2)
    silence = os.open(os.devnull, os.O_WRONLY)  # DeepSpeed says that there is no GPU
    for number in (1, 2):
        os.dup2(silence, number)
    try:
        for name in (*(module.name for module in pkgutil.walk_packages(pretrain.__path__, "pretrain.")), *LIBRARIES):
            importlib.import_module(name)
        draw_once()
        sys.stdout.flush()
    finally:
        for number, own in enumerate(kept, start=1):
            os.dup2(own, number)
            os.close(own)
        os.close(silence)
    sys.path.remove(str(ROOT))


def draw_once() -> None:
    """Every finished run draws its losses; the first picture of a process also finds the fonts."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.add_subplot(title="text").set_xlabel("text")
    figure.savefig(io.BytesIO())


def measure_once() -> None:
    """Every run on a CPU measures its peak, for half a second; those that are forked find this machine's known."""
    import torch

    from pretrain import hardware

    measured = functools.cache(hardware.measured_matrix_flops)
    for dtype, size in ((torch.float32, 1024), (torch.bfloat16, 256 if hardware.missing_bf16("cpu") else 1024)):
        measured(dtype, torch.device("cpu"), size=size)
    hardware.measured_matrix_flops = measured


def serve() -> dict:
    """Forks for every request; returns the request in the process that is to run it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + os.environ[SOCKET])
    listener.listen(64)
    os.write(int(sys.argv[1]), b"!")
    os.close(int(sys.argv[1]))
    wake, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    children: dict[int, socket.socket] = {}
    ended: dict[socket.socket, int] = {}
    while True:
        ready = select.select([listener, wake, sys.stdin.fileno(), *ended], [], [])[0]
        if sys.stdin.fileno() in ready:  # whoever started this is gone
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if wake in ready:
            wake.recv(4096)
            report_ends(children, ended)
        for connection in ended.keys() & set(ready):
            os.waitpid(ended.pop(connection), 0)
            connection.close()
        if listener in ready:
            connection = listener.accept()[0]
            request, files = receive(connection)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts a job in the background
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                for other in (listener, wake, wakes, connection, *children.values(), *ended):
                    other.close()
                return request | {"files": files}
            for file in files:
                os.close(file)
            children[pid] = connection
            connection.sendall(pid.to_bytes(8, "little"))


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    content = connection.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
    return json.loads(content), list(array.array("i", files))


def report_ends(children: dict[int, socket.socket], ended: dict[socket.socket, int]) -> None:
    """Tells whoever waits for them the statuses of children that have ended, and moves them to `ended`.

    There they stay zombies until that has been read, as a parent's own children do: torchrun asks whether a process
    has ended and then signals its group, which raises ProcessLookupError if it was gone in between.
    """
    for pid in list(children):
        if found := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            status = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
            connection = children.pop(pid)
            ended[connection] = pid
            with contextlib.suppress(OSError):  # nobody waits any more
                connection.sendall(status.to_bytes(8, "little"))


def become(request: dict) -> list[str]:
    """Makes this process the one that was asked for; returns the arguments after the interpreter's own."""
    if request["new_session"]:
        os.setsid()
    for target, file in enumerate(request["files"]):
        os.dup2(file, target)
    for file in request["files"]:
        if file > 2:
            os.close(file)
    own = {name: os.environ[name] for name in (SOCKET, ENVIRONMENT)}
    imported = of_the_hub(os.environ)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(own)
    if request["takes_terminal"]:
        take_terminal()
    if of_the_hub(os.environ) != imported:
        read_hub_variables()
    os.chdir(request["folder"])
    ASKED_BY[:] = [request["starter"]]
    arguments = request["arguments"]
    unbuffered = arguments[0] == "-u"
    sys.stdout.reconfigure(line_buffering=unbuffered or os.isatty(1))
    elastic = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(elastic).Popen = WarmPopen
    if not request["takes_terminal"]:  # else Ctrl-C must reach its children too, which torchrun's don't ask for
        subprocess.Popen = WarmPopen
    importlib.import_module("pretrain.training.watchdog").LAUNCHER = os.getppid()
    return arguments[1:] if unbuffered else arguments


def run(asked: list[str]) -> None:
    """What the interpreter does with the rest of its command line."""
    sys.path[0:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if asked[0] == "-c":
        sys.argv[:] = ["-c", *asked[2:]]
        sys.path.insert(0, "")
        exec(compile(asked[1], "<string>", "exec"), {"__name__": "__main__"})
    elif asked[0] == "-m":
        sys.argv[:] = asked[1:]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(asked[1], None)  # else runpy warns
        runpy.run_module(asked[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = asked
        sys.path.insert(0, str(Path(asked[0]).parent.resolve()))
        runpy.run_path(asked[0], run_name="__main__")


def leave(code: object) -> None:
    """Ends the process as sys.exit(code) does, without taking its modules apart. Returns for a code in words."""
    if code is None or isinstance(code, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(ValueError):  # closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    sys.path[0] = str(ROOT / "tests")
    from support import warm_python  # what it keeps must be where others who import it look

    warm_python.import_everything()
    warm_python.measure_once()
    gc.collect()
    gc.freeze()
    asked = warm_python.become(warm_python.serve())
    del sys.path[0]
    try:
        warm_python.run(asked)
        warm_python.leave(0)
    except SystemExit as end:
        warm_python.leave(end.code)
        raise
