"""Encrypted connections of clients, with a certificate of the operator's."""

import ssl
from pathlib import Path

from spmd_tx.errors import StartError


def context_of(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return what encrypts connections; None where they are not encrypted.

    The file of the certificate has the chain behind it, the server's own first, and may have the key, too.
    Raises StartError for files that cannot be used.
    """
    if certificate is None:
        if key is not None:
            raise StartError(
                f"--tls-key is {key}, and there is no --tls-cert; name the file of the certificate"
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and later
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except ssl.SSLError as problem:
        raise StartError(
            f"--tls-cert {certificate} and --tls-key {key or 'of the same file'} are no PEM files of a "
            f"certificate and its key: {problem.reason or problem}"
        ) from None
    except OSError as problem:
        raise StartError(
            f"cannot read --tls-cert {certificate} and --tls-key {key}: {problem.strerror}"
        ) from None
    return context


def _no_password() -> str:
    raise StartError(
        "the key of --tls-key needs a password, for which the server cannot ask; store it without one"
    )
