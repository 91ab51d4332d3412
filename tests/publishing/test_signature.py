"""Tests for signed folders: only the key's owner can sign, and any change is reported."""

import hashlib
import json
import shutil
import sys

import pytest

import publish
from pretrain.errors import InputError
from pretrain_tools.publishing.provenance import provenance_problems
from pretrain_tools.publishing.signature import load_key, signature_problems
from support.run_folders import write_run


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Folder with two key pairs, and with keys that must be rejected."""
    pytest.importorskip("model_signing.signing", exc_type=ImportError)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    def write(name, key, protection=None):
        protection = protection or serialization.NoEncryption()
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        (folder / name).write_bytes(key.private_bytes(pem, form, protection))
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (folder / f"{name}.pub").write_bytes(public)

    folder = tmp_path_factory.mktemp("keys")
    for name in ("mine", "other"):
        write(name, ec.generate_private_key(ec.SECP256R1()))
    write("edwards", ed25519.Ed25519PrivateKey.generate())
    protected = serialization.BestAvailableEncryption(b"secret")
    write("protected", ec.generate_private_key(ec.SECP256R1()), protected)
    return folder


@pytest.fixture(scope="module")
def signed(tmp_path_factory, keys):
    """A signed folder. Tests must not change it."""
    folder = tmp_path_factory.mktemp("runs")
    offer = ["--repo", "me/tiny", "--license", "mit", "--sign", str(keys / "mine")]
    run = write_run(folder / "x", steps=(4,))
    assert publish.main(["--run", str(run), *offer, "--dry_run", "--output", str(folder / "out")]) == 0
    return folder / "out/main"


@pytest.fixture
def folder(signed, tmp_path):
    return shutil.copytree(signed, tmp_path / "copy")


def test_every_change_is_reported(folder, keys):
    def problems():
        return signature_problems(folder, load_key("--public_key", keys / "mine.pub"))

    assert problems() == [] and provenance_problems(folder) == []
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        (problem,) = problems()
        changed = "model.sig doesn't match" if path.name == "model.sig" else f"{path.name} was changed"
        assert problem.startswith(changed)
        path.unlink()
        (problem,) = problems()
        unsigned = "model.sig is missing: the folder isn't signed"
        assert problem.startswith("model.sig doesn't match" if path.name != "model.sig" else unsigned)
        assert path.name in problem
        assert f"{path.name} is missing" in provenance_problems(folder)[0]
        path.write_bytes(content)


def test_a_forged_provenance_is_detected(folder, keys, capsys):
    """A matching provenance.json isn't enough: a valid signature needs the key."""
    path = folder / "provenance.json"
    (folder / "README.md").write_text("a better model")
    contents = json.loads(path.read_text())
    size, digest = 14, hashlib.sha256(b"a better model").hexdigest()
    contents |= {"seal": "0" * 64, "files": {**contents["files"], "README.md": {"bytes": size, "sha256": digest}}}
    text = json.dumps(contents)
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))
    assert provenance_problems(folder) == []
    assert publish.main(["--verify", str(folder), "--public_key", str(keys / "mine.pub")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{folder}: {name} was changed after it was signed" for name in ("README.md", "provenance.json")]


def test_the_signers_key_is_checked(folder, keys, capsys, tmp_path):
    verify = ["--verify", str(folder), "--public_key"]
    assert publish.main([*verify, str(keys / "mine.pub")]) == 0
    assert f"signed with the private key for {keys / 'mine.pub'}" in capsys.readouterr().out
    assert publish.main([*verify, str(keys / "other.pub")]) == 1
    assert "model.sig doesn't match the files or the key" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"--public_key is required to check the signature"):
        publish.main(["--verify", str(folder)])
    (tmp_path / "links").mkdir()  # links, as in the Hub's cache
    for path in folder.iterdir():
        (tmp_path / "links" / path.name).symlink_to(path)
    assert publish.main(["--verify", str(tmp_path / "links"), "--public_key", str(keys / "mine.pub")]) == 0


@pytest.mark.parametrize("name", ["nothing", "mine.pub", "edwards", "protected"])
def test_keys_that_cannot_sign_are_rejected(keys, name):
    with pytest.raises(
        InputError, match=rf"--sign .*{name}: can't be used .*use an elliptic-curve private key in PEM format"
    ):
        load_key("--sign", keys / name)


def test_a_missing_package_is_reported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(
        InputError, match=r"--public_key: requires model-signing .* pip install model-signing pyOpenSSL"
    ):
        load_key("--public_key", tmp_path / "key.pub")
