"""Publishes a run's models on the Hugging Face Hub, with a model card generated from the run's records.

    python publish.py --run runs/x --repo me/llama-125m-base --license apache-2.0          # final/ as main
    python publish.py --run runs/x --repo me/llama-125m-base --checkpoint 5000             # as revision step-5000
    python publish.py --run runs/x --repo me/llama-125m-base --milestones --final --private
    python publish.py --run runs/x --repo me/llama-125m-base --dry_run --output DIR        # only write the files
    python publish.py --run runs/x --gguf x.gguf                                           # write a file for llama.cpp
    python publish.py --verify me/llama-125m-base                                          # also accepts a folder
    python publish.py --run runs/x --repo me/llama-125m-base --sign key.pem                # also sign it

Log in once with `hf auth login`, or set HF_TOKEN. Run the same command again to resume an interrupted upload.
Repository, license and language can be set in the recipe (hub.repository, publish.license, publish.language).
"""

import argparse
import os
import sys
from pathlib import Path

from pretrain.errors import InputError, did_you_mean, run_script

ALLOWED_WITH = {
    "--verify": ("--verify", "--public_key"),
    "--gguf": ("--gguf", "--run", "--checkpoint", "--final"),
}
"""{option: options that can be combined with it}. Other options can be combined freely."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="RUN", help="run folder")
    add("--repo", metavar="OWNER/NAME", help="Hub repository, created if it doesn't exist [from the recipe]")
    add(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="STEP",
        help="steps of the checkpoints to publish (each as revision step-STEP), or best",
    )
    add("--milestones", action="store_true", help="publish all checkpoints kept by checkpoint.keep_every")
    add("--final", action="store_true", help="publish final/ as main (default)")
    add("--private", action="store_true", help="make the repository private [hub.private for the recipe's repository]")
    add("--license", metavar="ID", help="Hub license ID, such as apache-2.0 [from the recipe]")
    add(
        "--language",
        nargs="+",
        default=[],
        metavar="CODE",
        help="languages of the training text, such as en [from the recipe]",
    )
    add("--dry_run", action="store_true", help="write the files to --output instead of uploading them")
    add("--output", type=Path, metavar="DIR", help="with --dry_run: output folder, with one subfolder per revision")
    add("--gguf", type=Path, metavar="FILE", help="write a GGUF file for llama.cpp and don't upload")
    text = "used by train.py: retry, record the outcome in metrics.jsonl, and publish again after a pending evaluation"
    add("--beside_training", action="store_true", help=text)
    text = "with --checkpoint: run Python code from its folder (off by default)"
    add("--trust_remote_code", action="store_true", help=text)
    text = "verify all files in a published folder or OWNER/NAME[@REVISION]; can only be combined with --public_key"
    add("--verify", metavar="PLACE", help=text)
    add(
        "--sign",
        type=Path,
        metavar="KEY",
        help="sign the folder with an elliptic-curve key in PEM format (requires model-signing)",
    )
    add("--public_key", type=Path, metavar="KEY", help="with --verify: PEM public key to check the signature with")
    return parser


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the command line. Also returns all problems that can be found without reading the run."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    # argparse has no public API to list its options.
    flags = [flag for action in parser._actions for flag in action.option_strings]
    problems = [f"{word}: unknown option{did_you_mean(word, flags)}" for word in unknown]
    arguments.checkpoint = [int(text) if text.isdecimal() else text for text in arguments.checkpoint]
    given = [flag for flag in flags if any(word.partition("=")[0] == flag for word in argv)]
    for mode, allowed in ALLOWED_WITH.items():
        if mode in given:
            problems += [f"{flag}: can't be combined with {mode}" for flag in given if flag not in allowed]
    if "--public_key" in given and "--verify" not in given:
        problems.append("--public_key: only valid with --verify")
    if arguments.dry_run != (arguments.output is not None):
        problems.append(
            "--dry_run and --output DIR: only valid together; --output is the folder to write the files to"
        )
    return arguments, problems


def main(argv: list[str]) -> int:
    arguments, problems = read_arguments(argv)  # before importing torch, which is slow
    if arguments.verify is None:
        from pretrain_tools.publishing.publish import publish

        return publish(arguments, problems)
    if problems:
        raise InputError(*problems)
    from pretrain_tools.publishing.publish import verify

    return verify(arguments.verify, arguments.public_key)


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    run_script(lambda: main(sys.argv[1:]))
