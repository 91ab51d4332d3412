"""Compares llama.cpp's tokens and logits for a GGUF file with those of transformers."""

import math
import tempfile
from pathlib import Path

import numpy as np
import psutil
import torch

from pretrain.checkpoint.tensor_files import SavedTensors
from pretrain.data.shards import open_shards
from pretrain.data.tokenizer import load_decoder
from pretrain.errors import InputError
from pretrain.runs.run_folder import read_config, setting
from pretrain.units import bytes_text
from pretrain_tools.publishing.gguf_file import write_gguf

LARGEST_DIFFERENCE = 1e-3
"""Maximum logit difference that the order of fp32 summation can explain."""
LARGEST_SHARE = 1e-2
"""Maximum difference for GPT-2, in standard deviations of the logits. llama.cpp uses an fp16 lookup table for GELU."""
MOST_TOKENS = 512
PASSAGE = """The committee met on 3 March 1994 at 10:45. "We'll need 1,250 more," she said; they'd asked for 12345678.

\tif (x_i != y_i) {  return f(x_i) * 0.5e-3; }   // naïve, but it's fast
Die Straße führt über Zürich nach Köln.  Ελληνικά, русский язык, עברית, العربية, हिन्दी, 日本語の文章、中文，한국어.
🙂👩‍🔬
"""
"""Text that tokenizers split differently: digits, contractions, whitespace and scripts."""


def validation_text(run: Path) -> str:
    """Returns the beginning of the run's validation data, or '' if the data no longer exists."""
    for source in setting(read_config(run), "data.validation") or setting(read_config(run), "data.train") or []:
        try:
            shards = open_shards(source["shards"], "validation", source.get("tokenizer"))
            ids = np.empty(min(shards.tokens, MOST_TOKENS), np.int64)
            shards.read(0, ids)
            return load_decoder(shards.manifest.tokenizer_folder).decode(ids.tolist(), skip_special_tokens=False)
        except InputError:
            continue
    return ""


def comparison_note(folder: Path, text: str) -> str:
    """Compares a convertible model with its GGUF file in fp32. Returns a sentence with the result.

    Raises InputError if the results differ (see `compare`).
    """
    try:
        import llama_cpp
    except ImportError:
        return (
            "llama.cpp and transformers weren't compared, because llama.cpp isn't installed "
            "(`pip install llama-cpp-python`)."
        )
    # Both programs load the weights in fp32.
    needed = 2 * sum(4 * math.prod(shape) for shape in SavedTensors(folder, "model").shapes().values())
    free = psutil.virtual_memory().available
    if needed > free:
        return (
            f"llama.cpp and transformers weren't compared, because this requires {bytes_text(needed)} of memory, but "
            f"only {bytes_text(free)} was free."
        )
    # Inside the folder, so that publish.py also removes it after it was killed.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = Path(temporary) / "fp32.gguf"
        write_gguf(folder, file, "fp32")
        tokens, largest = compare(folder, file, text)
    return (
        f"llama.cpp (llama-cpp-python {llama_cpp.__version__}) and transformers were compared in fp32 on {tokens} "
        f"tokens of text: they produce the same tokens, and their logits differ by at most {largest:.1e}."
    )


def compare(folder: Path, file: Path, text: str) -> tuple[int, float]:
    """Returns the number of compared tokens and the largest logit difference.

    Raises InputError if the tokens differ, or if the logits differ by more than rounding can explain.

    Args:
        folder: model folder for transformers.
        file: GGUF file with the same weights in fp32.
    """
    import llama_cpp
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    text = PASSAGE + text
    fp32 = llama_cpp.GGML_TYPE_F32  # the KV cache's default is fp16
    theirs = llama_cpp.Llama(
        str(file), n_ctx=MOST_TOKENS, n_batch=MOST_TOKENS, logits_all=True, type_k=fp32, type_v=fp32, verbose=False
    )
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    found = theirs.tokenize(text.encode(), add_bos=False, special=True)  # documents end with a special token
    if found != ids:
        same = next((n for n, pair in enumerate(zip(ids, found, strict=False)) if pair[0] != pair[1]), len(ids))
        raise InputError(
            f"--gguf: llama.cpp's tokens differ, starting at token {same} "
            f"({found[same : same + 5]} instead of {ids[same : same + 5]}), so the file isn't equivalent"
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = ids[: min(MOST_TOKENS, model.config.max_position_embeddings)]
    with torch.no_grad():
        ours_TV = model(torch.tensor([ids])).logits[0].numpy()
    theirs.eval(ids)
    largest = float(np.abs(np.array(theirs.scores[: len(ids)]) - ours_TV).max())
    theirs.close()
    limit = LARGEST_SHARE * float(ours_TV.std()) if model.config.model_type == "gpt2" else LARGEST_DIFFERENCE
    if not largest <= limit:  # nan included
        raise InputError(
            f"--gguf: llama.cpp's logits differ from transformers' by up to {largest:.3g}, but rounding can "
            f"explain only {limit:.3g}, so the file isn't equivalent"
        )
    return len(ids), largest
