"""Mutual TLS 1.3 between sites: who may talk, and how a refusal reads. Needs no torch.

Every site has a certificate that the run's private authority has signed (`farpipe certs`). A connection is let in when
the other side's certificate is signed by that authority, is valid today, and names the site that the other side claims.
"""

import contextlib
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote, unquote

from farpipe.core.errors import InputError

AUTHORITY_FILE: Final = "authority.pem"
CERTIFICATE_FILE: Final = "site.pem"
KEY_FILE: Final = "site.key"
SITE_URI: Final = "farpipe:site/"
"""Begins the name by which a certificate says whose it is (a URI among its alternative names)."""

_HINT: Final = "issue its site a certificate of this run's authority (farpipe certs issue) and copy it there"
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "it wants a certificate and got none",
    "UNKNOWN_CA": "it does not know the authority of this site's certificate",
    "CERTIFICATE_EXPIRED": "this site's certificate has expired",
    "CERTIFICATE_UNKNOWN": "it does not accept this site's certificate",
    "BAD_CERTIFICATE": "it does not accept this site's certificate",
    "DECRYPT_ERROR": "this site's certificate is not signed by the authority whose name it bears",
}
"""Meaning of the other side's alert, by a part of OpenSSL's name for it."""


class RefusedError(OSError):
    """One side does not accept the other; trying again would not help."""


@dataclass(frozen=True)
class TlsFiles:
    """The files that a site needs: the authority's certificate, the site's own, and its private key."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def find(cls, folder: Path | str, site: str) -> Self:
        """The files in `folder`, or in its subfolder `site` if one authority's folder holds all; InputError if none."""
        place = next((p for p in (Path(folder) / quote(site), Path(folder)) if (p / CERTIFICATE_FILE).is_file()), None)
        if place is None:
            below = f" and no {site}/{CERTIFICATE_FILE}" if site else ""
            raise InputError(
                f"{folder}: has no {CERTIFICATE_FILE}{below}; make them with `farpipe certs issue` and copy the site's "
                "folder here"
            )
        files = cls(place / AUTHORITY_FILE, place / CERTIFICATE_FILE, place / KEY_FILE)
        for path in (files.authority, files.key):
            if not path.is_file():
                raise InputError(f"{path}: is missing; copy the site's whole folder")
        return files

    def context(self, *, server: bool) -> ssl.SSLContext:
        """TLS 1.3 only, the other side's certificate required; InputError when the files are of no use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # which site it is counts, see `check_site`
        context.verify_mode = ssl.CERT_REQUIRED
        # The kernel encrypts where it can (Linux with CONFIG_TLS, OpenSSL built for it, Python 3.12): OpenSSL asks it
        # for each connection, and else encrypts itself.
        context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)
        if server:
            context.num_tickets = 0  # each connection is made from scratch
        _check_mode(self.key)
        try:
            context.load_verify_locations(self.authority)
            context.load_cert_chain(self.certificate, self.key, password=b"")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.certificate.parent}: certificate and key can't be used: {error}; issue new ones"
            ) from None
        return context


class Credentials:
    """A site's files as they are now: renewed ones count from the next connection on, without a restart.

    Files that are of no use, for they are just being copied, don't replace those that were. May be used by several
    threads. InputError when the first ones are of no use; `files` None: nothing is encrypted.
    """

    def __init__(self, files: TlsFiles | None) -> None:
        self._files, self._lock = files, threading.Lock()
        if files is not None:
            self._read_at, self._contexts = self._look(files), self._load(files)

    def context(self, *, server: bool) -> ssl.SSLContext | None:
        """Context of the next connection; None: not encrypted."""
        files = self._files
        if files is None:
            return None
        with self._lock:
            with contextlib.suppress(InputError, OSError):
                if (now := self._look(files)) != self._read_at:
                    self._contexts = self._load(files)
                    self._read_at = now
            return self._contexts[server]

    @staticmethod
    def _load(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        return files.context(server=False), files.context(server=True)

    @staticmethod
    def _look(files: TlsFiles) -> list[tuple[int, int]]:
        found = (path.stat() for path in (files.authority, files.certificate, files.key))
        return [(status.st_ino, status.st_mtime_ns) for status in found]


def _check_mode(key: Path) -> None:
    try:
        mode = key.stat().st_mode
    except OSError as error:
        raise InputError(f"{key}: {error.strerror}") from None
    if mode & 0o077:
        raise InputError(f"{key}: others than its owner may read this private key; chmod 600 it")


def secure(sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> ssl.SSLSocket:
    """`sock` within TLS, both certificates checked against the authority; RefusedError says what is wrong.

    `sock` must have a timeout; on the connecting side the acceptor's refusal is heard with the first read only
    (see `explained`).
    """
    with explained():
        return context.wrap_socket(sock, server_side=server)


class explained(contextlib.AbstractContextManager["explained"]):  # noqa: N801 - reads as a word where it is used
    """Turns what OpenSSL says of certificates into a RefusedError that says who must do what."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = error.verify_message.rstrip(".")
            raise RefusedError(f"its certificate is not accepted here: {reason}; {_HINT}") from None
        if isinstance(error, ssl.SSLError) and error.reason:
            for name, meaning in _ALERTS.items():
                if f"ALERT_{name}" in error.reason:
                    raise RefusedError(f"it refused: {meaning}; issue one with farpipe certs issue") from None
            if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in error.reason:
                raise RefusedError(f"it showed no certificate; {_HINT}") from None
            if "WRONG_VERSION_NUMBER" in error.reason or "HTTP_REQUEST" in error.reason:
                raise RefusedError(
                    "it does not speak TLS; start both sides with --certs, or both with --allow-plaintext"
                ) from None


def site_of(sock: socket.socket) -> str | None:
    """The site that the peer's certificate names; None without TLS, or when it names none."""
    names = _names(sock, "URI")
    return next((unquote(name.removeprefix(SITE_URI)) for name in names if name.startswith(SITE_URI)), None)


def check_site(sock: socket.socket, site: str) -> None:
    """RefusedError unless the peer's certificate belongs to `site`; a connection without TLS has none to check."""
    if isinstance(sock, ssl.SSLSocket) and (found := site_of(sock)) != site:
        whose = f"site {found!r}" if found else "no site of farpipe's"
        raise RefusedError(f"it should be at site {site!r}, but its certificate is that of {whose}; {_HINT}")


def check_address(sock: socket.socket, address: str) -> None:
    """RefusedError when the peer's certificate is limited to addresses and `address`, which was dialled, is none."""
    allowed = [*_names(sock, "IP Address"), *(ip for host in _names(sock, "DNS") for ip in _resolve(host))]
    if (_names(sock, "IP Address") or _names(sock, "DNS")) and address not in allowed:
        raise RefusedError(
            f"its certificate is for {', '.join(allowed) or 'hosts unknown here'}, not {address}; {_HINT}"
        )


def _names(sock: socket.socket, kind: str) -> list[str]:
    if not isinstance(sock, ssl.SSLSocket):
        return []
    try:
        certificate: Any = sock.getpeercert() or {}
    except AttributeError:  # ssl's own answer when another thread has closed the socket
        raise ConnectionAbortedError("closed while its certificate was read") from None
    return [name for key, name in certificate.get("subjectAltName", ()) if key == kind]


def _resolve(host: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    return []
