"""Keys for encryption at rest: their sources, and how they are kept out of logs and pickles."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from pathlib import Path

from checkpointing.errors import StoreUnfit
from checkpointing.stores.address import NO_USER

SIZE = 32
VARIABLE = "ELASTIC3D_STORE_KEY"


class Key:
    """A secret of 32 bytes, from which every object's own key is derived. Its repr shows the id, never the secret."""

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        """Take the secret; ValueError unless it is 32 bytes."""
        if len(secret) != SIZE:
            raise ValueError(f"a key has {SIZE} bytes, not {len(secret)}")
        self._secret = bytes(secret)
        self.id = self._derive(b"elastic3d-checkpoint key id")[:8]

    def __repr__(self) -> str:
        """Return the key's id."""
        return f"Key(id={self.id.hex()})"

    def __reduce__(self) -> str | tuple[object, ...]:
        """Refuse to be pickled: keys are not passed on that way."""
        raise TypeError("a key is not pickled; give the file it is in")

    def for_object(self, name: str) -> bytes:
        """Return the key of the object `name`."""
        return self._derive(b"elastic3d-checkpoint object " + name.encode())

    def for_pack_names(self) -> bytes:
        """Return the key under which the ids of packs are encrypted: 64 bytes, for AES-256-SIV."""
        return self._derive(b"elastic3d-checkpoint pack names", 64)

    def text(self) -> str:
        """Return the secret as text for a key file or a secrets manager."""
        return base64.b64encode(self._secret).decode()

    @classmethod
    def generate(cls) -> Key:
        """Return a new random key."""
        return cls(secrets.token_bytes(SIZE))

    @classmethod
    def from_text(cls, text: str, where: str) -> Key:
        """Return the key written as 64 hex digits or as base64; StoreUnfit names `where`, never the text."""
        text = text.strip()
        try:
            secret = bytes.fromhex(text) if len(text) == 2 * SIZE else base64.b64decode(text, validate=True)
            return cls(secret)
        except (ValueError, binascii.Error):
            raise StoreUnfit(
                f"{where}: is no key: 32 random bytes are wanted, as 64 hex digits or in base64. "
                "Make one with: openssl rand -base64 32"
            ) from None

    @classmethod
    def from_file(cls, path: Path | str) -> Key:
        """Return the key in a file, as text or as 32 raw bytes; StoreUnfit if there is none."""
        try:
            data = Path(path).expanduser().read_bytes()
        except RuntimeError:
            raise StoreUnfit(f"key file {path}: {NO_USER}") from None
        except OSError as error:
            raise StoreUnfit(f"key file {path}: cannot be read: {error.strerror}") from error
        if len(data) == SIZE:
            return cls(data)
        return cls.from_text(data[:4096].decode("ascii", "replace"), f"key file {path}")

    @classmethod
    def from_env(cls, variable: str = VARIABLE) -> Key:
        """Return the key in an environment variable, as text; StoreUnfit if there is none."""
        text = os.environ.get(variable)
        if not text:
            raise StoreUnfit(f"environment variable {variable}: is not set; it should hold the store's key")
        return cls.from_text(text, f"environment variable {variable}")

    def _derive(self, info: bytes, length: int = SIZE) -> bytes:
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise StoreUnfit(
                "encryption needs the package cryptography: pip install 'elastic3d[encryption]'"
            ) from error
        return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(self._secret)
