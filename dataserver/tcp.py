"""Control over TCP: where, and what protects it. Checked before any process is forked; imports no gRPC."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from renaissance.core.errors import ValueRejected
from renaissance.data.address import read_token, tcp_endpoint

_OPTIONS = ("--tls-cert", "--tls-key", "--token-file")


@dataclass(frozen=True, slots=True)
class TcpAccess:
    """Where and how control is offered over TCP."""

    address: str  # tcp:HOST:PORT
    token: str | None
    certificate: bytes | None  # PEM chain
    key: bytes | None

    @classmethod
    def of(
        cls, address: str | None, certificate: Path | None, key: Path | None, token_file: Path | None
    ) -> TcpAccess | None:
        """From the command's options; None without an address.

        Raises ValueRejected when TCP would be open to everybody, when only half of TLS is given, when a file cannot be
        used, and when any of it is given without TCP.
        """
        given = [name for name, value in zip(_OPTIONS, (certificate, key, token_file), strict=True) if value]
        if address is None:
            if given:
                raise ValueRejected(f"{given[0]} is given without --listen tcp:HOST:PORT; a Unix socket needs none")
            return None
        tcp_endpoint(address)
        if (certificate is None) != (key is None):
            raise ValueRejected(f"{given[0]} is given alone; TLS needs --tls-cert and --tls-key")
        if not given:
            raise ValueRejected(
                f"--listen {address}: over TCP anybody could open sessions; give --token-file FILE (mode 0600, such as "
                "`openssl rand -hex 32` makes), or --tls-cert and --tls-key, best all three"
            )
        access = cls(
            address=address,
            token=None if token_file is None else read_token(token_file),
            certificate=None if certificate is None else _read_pem(certificate, "--tls-cert", b"CERTIFICATE"),
            key=None if key is None else _read_pem(key, "--tls-key", b"PRIVATE KEY"),
        )
        if certificate is not None and key is not None:
            _check_pair(certificate, key)
        return access


def _read_pem(path: Path, option: str, kind: bytes) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueRejected(f"{option} {path}: cannot be read: {error.strerror}") from None
    if kind + b"-----" not in content:
        raise ValueRejected(f"{option} {path}: expected a {kind.decode().lower()} in PEM form")
    return content


def _check_pair(certificate: Path, key: Path) -> None:
    """gRPC says of a pair that does not fit no more than that it cannot listen."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise ValueRejected(
            f"--tls-key {key}: is not a usable key of --tls-cert {certificate} ({error}); expected the key that the "
            "certificate was made with, without a passphrase"
        ) from None
