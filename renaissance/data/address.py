"""Addresses of a dataserver: ``unix:PATH``, always there, and ``tcp:HOST:PORT`` for control from elsewhere.

Batches travel through shared memory, so the data socket is a Unix socket beside the control socket in any case.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import quote

from renaissance.core.errors import DataServerError, ValueRejected

DATA_SUFFIX = ".data"
"""The data socket lies beside the control socket, under its name and this suffix."""

MAX_TOKEN_BYTES = 4096
MIN_TOKEN_BYTES = 16


def is_tcp(address: str) -> bool:
    """True for ``tcp:...``; whether the rest makes sense is for ``tcp_endpoint`` to say."""
    return address.startswith("tcp:")


def unix_path(address: str) -> str:
    """The path of ``unix:PATH``. Raises ValueRejected for other schemes and for paths a Unix socket cannot have."""
    scheme, _, path = address.partition(":")
    if scheme != "unix":
        raise ValueRejected(f"address {address!r}: expected unix:PATH or tcp:HOST:PORT")
    path = path.removeprefix("//")
    longest = 107 - len(DATA_SUFFIX)
    if not path or len(path.encode()) > longest:
        raise ValueRejected(f"address {address!r}: expected unix:PATH with a path of 1 to {longest} bytes")
    return path


def tcp_endpoint(address: str, *, lowest_port: int = 1) -> tuple[str, int]:
    """(host, port) of ``tcp:HOST:PORT`` or ``HOST:PORT``; an IPv6 address stands in brackets. Raises ValueRejected."""
    host, colon, port = address.removeprefix("tcp:").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
    if not (colon and host) or not lowest_port <= number <= 65535:
        raise ValueRejected(
            f"address {address!r}: expected HOST:PORT with a port of {lowest_port} to 65535, such as 127.0.0.1:7001 "
            "or [::1]:7001"
        )
    return host, number


def grpc_target(address: str) -> str:
    """The gRPC name of an address. A Unix path is a URI there, in which %, ? and # would mean something else."""
    if is_tcp(address):
        host, port = tcp_endpoint(address)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"unix:{quote(os.fsencode(unix_path(address)), safe='/')}"


def runtime_folder() -> Path:
    """Folder of the default socket, made with mode 0700: $XDG_RUNTIME_DIR/renaissance or /tmp/renaissance-UID.

    Raises ValueRejected when it exists but belongs to somebody else or is open to others.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "renaissance" if base else Path(f"/tmp/renaissance-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, parents=False, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ValueRejected(f"{folder}: cannot be made or read: {error.strerror}; give unix:PATH") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077 or not stat.S_ISDIR(status.st_mode):
        raise ValueRejected(f"{folder}: expected a folder of user {os.geteuid()} with mode 0700; give unix:PATH")
    return folder


def default_address() -> str:
    """Where a daemon listens, and a client looks, when nothing is said."""
    return f"unix:{runtime_folder() / 'dataserver.sock'}"


def read_token(path: str | os.PathLike[str]) -> str:
    """The token in a file that only its owner may read. Raises ValueRejected for any other file."""
    name = os.fspath(path)
    try:
        with open(name, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueRejected(f"token file {name}: is not a regular file")
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ValueRejected(f"token file {name}: cannot be read: {error.strerror}") from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise ValueRejected(
            f"token file {name}: mode {stat.S_IMODE(status.st_mode):04o} of user {status.st_uid}; expected 0600 of "
            f"user {os.geteuid()}: chmod 600 {name}"
        )
    token = content.strip()
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ValueRejected(
            f"token file {name}: expected one line of {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} visible ASCII characters, "
            f"such as `openssl rand -hex 32` makes"
        )
    return token.decode("ascii")


def machine_identity() -> str:
    """The running kernel's boot id: two processes that see the same one can share memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise DataServerError(f"/proc/sys/kernel/random/boot_id: {error.strerror}; is /proc mounted?") from None
