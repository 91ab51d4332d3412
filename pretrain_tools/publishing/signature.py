"""Signatures of published folders by OpenSSF model-signing, with an elliptic key of the user's and without a network.

https://github.com/sigstore/model-transparency; `model_signing verify key` checks them too.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.files import SIGNATURE_FILE


def load_signer(key: Path) -> Any:
    """model-signing's configuration for a private key. Raises InputError if there is none, or no such package."""
    signing, *_ = import_model_signing("--sign")
    remedy = "give an elliptic private key in PEM without a password: openssl ecparam -name prime256v1 -genkey -noout"
    with_key = signing.Config().use_elliptic_key_signer
    return load_key("--sign", key, lambda: with_key(private_key=key), remedy)


def load_verifier(key: Path) -> Any:
    """model-signing's configuration for a public key. Raises InputError if there is none, or no such package."""
    _, verifying, _ = import_model_signing("--public_key")
    remedy = "give the signer's public key in PEM: openssl ec -in KEY -pubout"
    with_key = verifying.Config().use_elliptic_key_verifier
    return load_key("--public_key", key, lambda: with_key(public_key=key), remedy)


def import_model_signing(flag: str) -> tuple[Any, Any, Any]:
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise InputError(f"{flag}: needs model-signing ({error}); pip install model-signing pyOpenSSL") from error
    return signing, verifying, hashing


def load_key(flag: str, path: Path, load: Any, remedy: str) -> Any:
    try:
        return load()
    except Exception as error:  # cryptography has many: not PEM, another kind of key, encrypted
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{flag} {path}: not usable ({type(error).__name__}: {reason}); {remedy}") from None


def hashing_config() -> Any:
    *_, hashing = import_model_signing("--sign")
    # The Hub's cache is made of links.
    return hashing.Config().use_file_serialization(hashing_algorithm="sha256").set_allow_symlinks(True)


def sign(folder: Path, key: Path) -> None:
    """Writes model.sig, the signature of every file of a folder."""
    load_signer(key).set_hashing_config(hashing_config()).sign(folder, folder / SIGNATURE_FILE)


def signature_problems(folder: Path, verifier: Any) -> list[str]:
    """Every signed file that is no longer so, by name, and a signature that is not the key's; [] if all is well."""
    path = folder / SIGNATURE_FILE
    try:
        envelope = json.loads(path.read_bytes())["dsseEnvelope"]
        coded = [envelope["payload"], *(signature["sig"] for signature in envelope["signatures"])]
        # Decoders ignore the last bits, which a change may be in.
        if any(base64.b64encode(base64.b64decode(text)).decode() != text for text in coded):
            return [f"{SIGNATURE_FILE} was changed: it is not as model-signing writes it"]
        # Files that the Hub or a download adds were never signed; added ones are the provenance's to find.
        checker = verifier.set_hashing_config(hashing_config()).set_ignore_unsigned_files(True)
        checker.verify(folder, path)
    except FileNotFoundError:
        return [f"{SIGNATURE_FILE} is missing"]
    except Exception as error:  # of parsers, of cryptography and model-signing's own
        if names := re.findall(r"Hash mismatch for \\*'(.+?)\\*': Expected", str(error)):
            return [f"{name} was changed after it was signed" for name in names]
        if missing := re.search(r"Cannot use '(.+)' as file or directory", str(error)):
            return [f"{Path(missing[1]).name} was signed and is missing"]
        reason = " ".join(str(error).split())[:200]
        return [f"{SIGNATURE_FILE} was changed, or made with another key ({type(error).__name__}: {reason})"]
    return []
