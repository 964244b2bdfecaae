"""The group's secret: where it comes from, and fingerprints to compare two workers' secrets.

The workers use the secret in csrc/transport/ucx/handshake.h.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from torch_rpc_ext._base import environment

if TYPE_CHECKING:
    from torch_rpc_ext.options import UcxRpcBackendOptions

#: Bytes; a shorter secret could be guessed from recorded traffic.
MINIMUM = 16
_PURPOSE = b"torch_rpc_ext fingerprint"


def own(options: UcxRpcBackendOptions) -> bytes | None:
    """Return the secret that the user gave this worker, or None where the store gives one out.

    Raises:
        ValueError: the file cannot be used, or the secret is too short. The text never holds a
            secret.
    """
    if options.secret is not None:
        return _checked(options.secret, "the option secret")
    if options.secret_file is not None:
        return _read(options.secret_file, "the option secret_file")
    text = os.environ.get(environment.SECRET)
    if text:
        return _checked(text.encode(), f"the environment variable {environment.SECRET}")
    path = os.environ.get(environment.SECRET_FILE)
    if path:
        return _read(path, f"the environment variable {environment.SECRET_FILE}")
    return None


def draw() -> bytes:
    """Return a fresh secret, for the store to give out."""
    return secrets.token_bytes(32)


def fingerprint(secret: bytes | None) -> str:
    """Return a text that may be shown, the same for the same secret; '' for None."""
    if secret is None:
        return ""
    return hmac.new(secret, _PURPOSE, hashlib.sha256).hexdigest()[:16]


def _checked(secret: bytes, where: str) -> bytes:
    if len(secret) < MINIMUM:
        raise ValueError(
            f"{where} holds {len(secret)} bytes; a secret needs {MINIMUM} or more. "
            "`openssl rand -hex 32` makes a good one."
        )
    return secret


def _read(path: str, where: str) -> bytes:
    file = Path(path)
    try:
        mode = file.stat().st_mode
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"{where} names {path}, which cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{where} names {path}, which others may read or write (mode {mode & 0o777:o}): "
            f"`chmod 600 {path}`, and make a new secret if others may have seen it."
        )
    return _checked(secret, f"{path} ({where})")
