"""Commands in README.md and docs/."""

import re
import textwrap
from dataclasses import dataclass

from support.project import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("bash", "sh", "shell", "console")
FIRST_WORDS = {
    "python", "python3", "pip", "pipx", "uv", "conda", "accelerate", "torchrun", "deepspeed", "make", "git", "hf",
    "ray", "huggingface-cli", "tensorboard", "jupyter", "pytest", "ruff", "lm_eval", "sbatch", "srun", "squeue",
    "scancel", "salloc", "sky", "kubectl", "sudo", "apt", "apt-get", "brew", "docker", "podman", "apptainer", "curl",
    "wget", "ssh", "scp", "rsync", "cd", "cp", "mv", "ln", "rm", "mkdir", "cat", "head", "tail", "less", "watch",
    "tar", "unzip", "export", "source", ".", "bash", "sh", "env", "nohup", "tmux", "nvidia-smi", "groundwork-train",
    "groundwork-prepare-data", "groundwork-evaluate", "groundwork-plan", "groundwork-runs", "groundwork-publish",
}  # fmt: skip
"""First words of commands in indented blocks. In shell blocks, every line is a command."""

VARIABLES = r"^([A-Z_]+=\S* +)+"
"""Pattern for variables set before a command."""


@dataclass(frozen=True)
class Command:
    """A command on a page, with its continuation lines joined."""

    page: str
    line: int
    section: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.section}): {self.text}"


def commands_in(page: str, text: str) -> list[Command]:
    """Returns the commands in a page's indented and fenced blocks."""
    found, section, fence = [], "", None
    lines = iter(enumerate(text.splitlines(), start=1))
    for number, line in lines:
        if mark := re.match(r"\s*```(\w*)", line):
            fence = mark[1] if fence is None else None
            continue
        if fence is None and (heading := re.match(r"#+ (.*)", line)):
            section = heading[1]
        if fence is None and not line.startswith("    "):
            continue
        line = line.strip().removeprefix("$ ")
        word = re.sub(VARIABLES, "", line).partition(" ")[0]
        if word in FIRST_WORDS or (fence in SHELLS and line and not line.startswith("#")):
            while line.endswith("\\"):
                line = line[:-1] + next(lines)[1].strip()
            found.append(Command(page, number, section, re.sub(r"\s+# .*", "", line)))
    return found


def registrations() -> list[str]:
    """Returns the examples in the guides that register an extension."""
    text = "\n".join((ROOT / f"docs/{page}.md").read_text() for page in ("own_ideas", "own_loss", "own_data"))
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    return [textwrap.dedent(block).partition("\npython ")[0].strip() for block in blocks if ".register(" in block]
