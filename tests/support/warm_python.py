"""Server process that imports everything once and forks for each script, because imports would take most of a test's
time.

All xdist workers share one server. `WarmPopen` works like `subprocess.Popen`, but forks Python scripts from the server
if possible, with the same arguments, environment, working folder, files, session, signals and exit status. Launchers
start their ranks in the same way.

Differences: a forked process skips the interpreter's cleanup, which takes 0.4 s, and its parent is the server. Use
`subprocess.Popen` in tests that depend on the parent, the command line or the interpreter's startup. If a variable
that imports read has changed, `WarmPopen` starts a new interpreter.
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
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "CUDA_", "TQDM_", "DS_", "MPL", "HOME", "TMPDIR",
    "TOKENIZERS_", "LANG", "LC_",
)  # fmt: skip
SET_BY_LIBRARIES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK",
    "TOKENIZERS_PARALLELISM", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""Variables set by libraries and launchers. PYTHONPATH is read in `run`, and forking is only used without a GPU."""
LIBRARIES = (
    "accelerate.commands.launch", "torch.distributed.run", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "matplotlib.pyplot",
    "datasets", "deepspeed", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen3.modeling_qwen3", "safetensors.torch", "huggingface_hub", "psutil", "torch.profiler",
    "gigatoken", "numba",
)  # fmt: skip


ASKED_BY: list[int] = []
"""PID of the process that requested this one from the server."""


STARTED: list[int] = []
"""File descriptor of the pipe that the server writes to when it is ready."""


def sizes_of_launch(words: list[str], folder: Path) -> dict[str, str]:
    """Returns variables for the sizes in an accelerate config that accelerate's launcher drops.

    Processes normally find the config file in their launcher's command line, but a forked launcher has the server's
    command line.
    """
    file = folder / words[words.index("--config_file") + 1] if "--config_file" in words else folder
    text = file.read_text() if file.is_file() else ""
    if "parallelism_config" not in text:
        return {}
    sizes = {name: re.search(rf"parallelism_config_{name}_size: *(\S+)", text) for name in ("pp", "ep")}
    return {f"PARALLELISM_CONFIG_{name.upper()}_SIZE": found[1] if found else "1" for name, found in sizes.items()}


class WarmPopen(subprocess.Popen):
    """subprocess.Popen that forks from the server if possible."""

    takes_terminal = False
    """If True, the process can receive Ctrl-C from the terminal on stdin."""
    _connection: socket.socket | None = None

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        python = [str(part) for part in args] if isinstance(args, list | tuple) else []
        environment = dict(os.environ if env is None else env)
        if preexec_fn or pass_fds or not can_be_forked(python, environment):
            if self.takes_terminal or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                preexec_fn = preexec_fn or self._begin  # with a preexec_fn, the whole process is copied first
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        environment = sizes_of_launch(python, Path(cwd or os.getcwd())) | environment
        # rest starts with startupinfo, creationflags, shell and six pipe ends.
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
        """Prepares a new interpreter as `serve` and `become` prepare a forked one."""
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
        """Returns the status as os.waitpid does, or SIGKILL if the server has died."""
        with self._connection:  # closing it makes the server reap the process
            status = self._connection.recv(8, socket.MSG_WAITALL)
        return int.from_bytes(status, "little") if status else signal.SIGKILL


class PopenInTerminal(WarmPopen):
    """WarmPopen for a terminal, which must be passed as stdin together with start_new_session."""

    takes_terminal = True


def take_terminal() -> None:
    """Makes the terminal on stdin this session's controlling terminal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def starter() -> int:
    """Returns the PID of the process that started this one, directly or through the server."""
    return ASKED_BY[0] if ASKED_BY else os.getppid()


def can_be_forked(command: list[str], environment: dict[str, str]) -> bool:
    """Returns True for a script under this interpreter, unless variables that imports read have changed."""
    if len(command) < 2 or command[0] != sys.executable or os.path.exists("/dev/nvidiactl"):
        return False  # CUDA doesn't survive a fork
    arguments = command[2:] if command[1] in ("-u", "-P") else command[1:]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c")):
        return False
    server()
    return json.loads(os.environ[ENVIRONMENT]) == read_by_imports(environment)


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(READ_BY_IMPORTS)}
    return {name: value for name, value in found.items() if name not in SET_BY_LIBRARIES}


def read_hub_variables() -> None:
    """Rereads the Hub's variables, such as HF_ENDPOINT and HF_HOME, as an import would."""
    import datasets.config
    import transformers.dynamic_module_utils
    from huggingface_hub import constants, hf_api, hf_file_system

    for module in (constants, datasets.config):  # all other modules use these
        importlib.reload(module)
    hf_api.api.endpoint = constants.ENDPOINT
    hf_file_system.HfFileSystem.clear_instance_cache()
    hf_file_system.hffs = hf_file_system.HfFileSystem()
    modules = os.environ.get("HF_MODULES_CACHE", os.path.join(constants.HF_HOME, "modules"))
    transformers.utils.hub.HF_MODULES_CACHE = transformers.dynamic_module_utils.HF_MODULES_CACHE = modules


def of_the_hub(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(("HF_", "XDG_CACHE_HOME"))}


def start_server() -> None:
    """Starts the server for this process and its child processes, without waiting until it is ready."""
    address = f"groundwork-{os.getpid()}"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", SOCKET: address}
    environment[ENVIRONMENT] = json.dumps(read_by_imports(environment))
    ready, writer = os.pipe()
    command = [sys.executable, __file__, str(writer)]
    # The server exits when its stdin closes, that is, when this process ends for any reason.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=[writer])
    os.close(writer)
    STARTED.append(ready)
    os.environ[SOCKET] = address
    os.environ[ENVIRONMENT] = environment[ENVIRONMENT]
    atexit.register(process.kill)


def server() -> str:
    """Returns the server's address, and starts the server on the first call."""
    if SOCKET not in os.environ:
        start_server()
    if STARTED:
        ready = STARTED.pop()
        is_ready = os.read(ready, 1)
        os.close(ready)
        if not is_ready:
            raise RuntimeError("the warm interpreter can't import the project; see its traceback above")
    return os.environ[SOCKET]


def import_everything() -> None:
    sys.path.insert(0, str(ROOT))
    import pretrain
    import pretrain_tools

    kept = os.dup(1), os.dup(2)
    silence = os.open(os.devnull, os.O_WRONLY)  # hides DeepSpeed's messages
    for number in (1, 2):
        os.dup2(silence, number)
    try:
        for package in (pretrain, pretrain_tools):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
        for name in LIBRARIES:
            importlib.import_module(name)
        draw_once()
        fill_caches()
        sys.stdout.flush()
    finally:
        for number, own in enumerate(kept, start=1):
            os.dup2(own, number)
            os.close(own)
        os.close(silence)
    sys.path.remove(str(ROOT))


def draw_once() -> None:
    """Saves a plot, because the first plot in a process is slow: it searches for fonts."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.add_subplot(title="text").set_xlabel("text")
    figure.savefig(io.BytesIO())


def fill_caches() -> None:
    """Fills caches that every run would fill again, which takes as long as training a tiny model."""
    import platform

    from numba.core import entrypoints
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from pretrain_tools.publishing import card

    for name in card.environment().list_templates():
        card.environment().get_template(name)
    entrypoints.init_all()  # imports extensions of numba, such as awkward
    get_checkpoint_conversion_mapping("llama")  # compiles a thousand regular expressions
    platform.processor()  # starts a process


def measure_once() -> None:
    """Measures the machine's peak FLOPS, so that forked runs don't have to."""
    import torch

    from pretrain import hardware

    measure = functools.cache(hardware.measured_matrix_flops)

    def measured(dtype, device="cpu", *, size=1024, least_repeats=5, least_seconds=0.5) -> float:
        assert torch.device(device).type == "cpu"
        return measure(dtype, size=size)

    measured(torch.float32)
    if hardware.missing_bf16("cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            measured(dtype, size=256)
    else:
        measured(torch.bfloat16)
    hardware.measured_matrix_flops = measured


def serve() -> dict:
    """Forks for every request. Returns the request in the child process."""
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
        if sys.stdin.fileno() in ready:  # the parent has exited
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
                if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell sets this for background jobs
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
    """Sends the status of each exited child to its client, and moves the child to `ended`.

    Children stay zombies until the client has read the status, because torchrun first checks if a process has exited
    and then signals its group, which raises ProcessLookupError for a reaped process.
    """
    for pid in list(children):
        if found := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            status = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status
            connection = children.pop(pid)
            ended[connection] = pid
            with contextlib.suppress(OSError):  # the client has gone
                connection.sendall(status.to_bytes(8, "little"))


def become(request: dict) -> list[str]:
    """Sets up this process as requested. Returns the arguments after the interpreter's options."""
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
    if not request["takes_terminal"]:  # in a terminal, Ctrl-C must also reach child processes
        subprocess.Popen = WarmPopen
    importlib.import_module("pretrain.training.watchdog").LAUNCHER = os.getppid()
    return arguments[1:] if unbuffered else arguments


def run(asked: list[str]) -> None:
    """Runs a command line as the interpreter would."""
    sys.path[0:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    is_safe = asked[0] == "-P"
    asked = asked[is_safe:]
    if asked[0] == "-c":
        sys.argv[:] = ["-c", *asked[2:]]
        sys.path.insert(0, "")
        exec(compile(asked[1], "<string>", "exec"), {"__name__": "__main__"})
    elif asked[0] == "-m":
        sys.argv[:] = asked[1:]
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        sys.modules.pop(asked[1], None)  # else runpy warns
        runpy.run_module(asked[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = asked
        sys.path.insert(0, str(Path(asked[0]).parent.resolve()))
        runpy.run_path(asked[0], run_name="__main__")


def leave(code: object) -> None:
    """Exits like sys.exit(code), but doesn't clean up modules. Returns if the code is a message."""
    if code is None or isinstance(code, int):
        threading._shutdown()
        atexit._run_exitfuncs()
        with contextlib.suppress(ValueError):  # closed
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    sys.path[0] = str(ROOT / "tests")
    from support import warm_python  # other modules must see the same state

    warm_python.import_everything()
    warm_python.measure_once()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)  # see conftest.py
    asked = warm_python.become(warm_python.serve())
    del sys.path[0]
    try:
        warm_python.run(asked)
        warm_python.leave(0)
    except SystemExit as end:
        warm_python.leave(end.code)
        raise
