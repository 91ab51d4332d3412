"""Signs and verifies published folders offline with OpenSSF model-signing and an elliptic-curve key.

See https://github.com/sigstore/model-transparency. `model_signing verify key` also verifies these signatures.
"""

import re
from pathlib import Path
from typing import Any

from pretrain.errors import InputError, one_line
from pretrain.files import SIGNATURE_FILE

REMEDIES = {
    "--sign": "use an elliptic-curve private key in PEM format without a password "
    "(to create one, run openssl ecparam -name prime256v1 -genkey -noout)",
    "--public_key": "use the signer's public key in PEM format (to extract it, run openssl ec -in KEY -pubout)",
}


def load_key(flag: str, key: Path) -> Any:
    """Returns model-signing's configuration for signing (--sign) or verifying (--public_key) with this key.

    Raises InputError if the key is unusable or the package isn't installed.
    """
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise InputError(
            f"{flag}: requires model-signing ({error}); run pip install model-signing pyOpenSSL"
        ) from error
    try:
        if flag == "--sign":
            config = signing.Config().use_elliptic_key_signer(private_key=key)
        else:
            config = verifying.Config().use_elliptic_key_verifier(public_key=key)
    except Exception as error:  # cryptography raises many types: not PEM, wrong key type, encrypted
        raise InputError(f"{flag} {key}: can't be used ({one_line(error)}); {REMEDIES[flag]}") from None
    # The Hub's cache contains symbolic links.
    hashes = hashing.Config().use_file_serialization(hashing_algorithm="sha256").set_allow_symlinks(True)
    return config.set_hashing_config(hashes)


def signature_problems(folder: Path, verifier: Any) -> list[str]:
    """Lists files that have changed since they were signed, or reports that the signature doesn't match."""
    path = folder / SIGNATURE_FILE
    if not path.exists():
        return [f"{SIGNATURE_FILE} is missing: the folder isn't signed"]
    try:
        # Files added by the Hub or by a download aren't signed. The provenance detects other added files.
        verifier.set_ignore_unsigned_files(True).verify(folder, path)
    except Exception as error:  # parsers, cryptography and model-signing raise many types
        if names := re.findall(r"Hash mismatch for \\*'(.+?)\\*': Expected", str(error)):
            return [f"{name} was changed after it was signed" for name in names]
        return [f"{SIGNATURE_FILE} doesn't match the files or the key ({one_line(error)})"]
    return []
