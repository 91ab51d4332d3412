"""Signs and verifies published folders with OpenSSF model-signing and the user's elliptic-curve key, offline.

https://github.com/sigstore/model-transparency; `model_signing verify key` also verifies these signatures.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.files import SIGNATURE_FILE

REMEDIES = {
    "--sign": "give an elliptic-curve private key in PEM without a password: "
    "openssl ecparam -name prime256v1 -genkey -noout",
    "--public_key": "give the signer's public key in PEM: openssl ec -in KEY -pubout",
}


def load_key(flag: str, key: Path) -> Any:
    """Returns model-signing's configuration for a signer (--sign) or a verifier (--public_key) with this key.

    Raises InputError if the key is unusable or the package isn't installed.
    """
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise InputError(f"{flag}: needs model-signing ({error}); pip install model-signing pyOpenSSL") from error
    try:
        if flag == "--sign":
            config = signing.Config().use_elliptic_key_signer(private_key=key)
        else:
            config = verifying.Config().use_elliptic_key_verifier(public_key=key)
    except Exception as error:  # cryptography raises many types: not PEM, another kind of key, encrypted
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{flag} {key}: not usable ({type(error).__name__}: {reason}); {REMEDIES[flag]}") from None
    # The Hub's cache contains symbolic links.
    hashes = hashing.Config().use_file_serialization(hashing_algorithm="sha256").set_allow_symlinks(True)
    return config.set_hashing_config(hashes)


def sign(folder: Path, key: Path) -> None:
    """Writes model.sig, the signature of every file of a folder."""
    load_key("--sign", key).sign(folder, folder / SIGNATURE_FILE)


def signature_problems(folder: Path, verifier: Any) -> list[str]:
    """Lists signed files that have changed, and a signature made with a different key."""
    path = folder / SIGNATURE_FILE
    try:
        envelope = json.loads(path.read_bytes())["dsseEnvelope"]
        coded = [envelope["payload"], *(signature["sig"] for signature in envelope["signatures"])]
        # Decoders ignore the last bits, so compare the exact text.
        if any(base64.b64encode(base64.b64decode(text)).decode() != text for text in coded):
            return [f"{SIGNATURE_FILE} was changed: it isn't in model-signing's exact form"]
        # Files added by the Hub or a download aren't signed. The provenance detects other added files.
        verifier.set_ignore_unsigned_files(True).verify(folder, path)
    except FileNotFoundError:
        return [f"{SIGNATURE_FILE} is missing"]
    except Exception as error:  # parsers, cryptography and model-signing raise many types
        if names := re.findall(r"Hash mismatch for \\*'(.+?)\\*': Expected", str(error)):
            return [f"{name} was changed after it was signed" for name in names]
        if missing := re.search(r"Cannot use '(.+)' as file or directory", str(error)):
            return [f"{Path(missing[1]).name} was signed and is missing"]
        reason = " ".join(str(error).split())[:200]
        return [f"{SIGNATURE_FILE} was changed, or made with another key ({type(error).__name__}: {reason})"]
    return []
