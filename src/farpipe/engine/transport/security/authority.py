"""The private authority of a cluster: makes itself, and certificates for the sites. Needs no torch.

    DIR/authority.pem, authority.key    the authority; the key stays where it was made
    DIR/SITE/authority.pem, site.pem, site.key    all that a site gets

Keys are of the curve P-256 and readable by their owner only.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from farpipe.core.errors import InputError, RunError
from farpipe.core.strict import write_text
from farpipe.engine.transport.security.tls import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, SITE_URI

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_KEY_FILE: Final = "authority.key"
AUTHORITY_DAYS: Final = 3650
SITE_DAYS: Final = 365
_CLOCKS_DIFFER: Final = datetime.timedelta(hours=1)
"""Certificates are valid from a little earlier than they were made, for sites whose clocks are behind."""


def init(folder: Path, days: int = AUTHORITY_DAYS) -> datetime.datetime:
    """Make an authority in `folder`; until when it is valid. InputError when there is one."""
    ec = _elliptic_curves()
    if (folder / AUTHORITY_KEY_FILE).exists() or (folder / AUTHORITY_FILE).exists():
        raise InputError(
            f"{folder}: has an authority already; a new one would make all its certificates worthless, so choose "
            "another folder or remove this one"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign(key, None, _name("farpipe authority"), key, [], days)
    _write_key(folder / AUTHORITY_KEY_FILE, key)
    try:
        _write_certificate(folder / AUTHORITY_FILE, certificate)
    except RunError:  # half an authority would only be in the way of the next one
        (folder / AUTHORITY_KEY_FILE).unlink()
        raise
    return certificate.not_valid_after_utc


def issue(
    folder: Path, site: str, *, hosts: Sequence[str] = (), ips: Sequence[str] = (), days: int = SITE_DAYS
) -> datetime.datetime:
    """Make a certificate for `site` in ``folder/site``, in the place of an earlier one; until when it is valid.

    With `hosts` or `ips` it is good only where those are dialled. It ends with the authority at the latest.
    """
    ec = _elliptic_curves()
    place = _place(folder, site)
    authority_key, authority = _load(folder)
    if (place / KEY_FILE).exists() and not (place / AUTHORITY_FILE).exists():
        raise InputError(f"{place / KEY_FILE}: is there already, and no key of this authority's; move it away")
    key = ec.generate_private_key(ec.SECP256R1())
    names = _alternative_names(site, hosts, ips)
    certificate = _sign(authority_key, authority, _name(f"farpipe site {site}"), key, names, days)
    _write_key(place / KEY_FILE, key)
    _write_certificate(place / CERTIFICATE_FILE, certificate)
    _write_certificate(place / AUTHORITY_FILE, authority)
    return certificate.not_valid_after_utc


def make_throwaway(folder: Path, sites: Sequence[str]) -> None:
    """An authority and certificates for all `sites` of a run on this machine; its key is not kept."""
    init(folder)
    for site in sites:
        issue(folder, site)
    (folder / AUTHORITY_KEY_FILE).unlink()


def _elliptic_curves() -> ModuleType:
    """Module of the library that makes certificates; InputError where it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise InputError("certificates need the cryptography library: pip install 'farpipe[secure]'") from None
    return ec


def _place(folder: Path, site: str) -> Path:
    """Folder of the site's files; InputError for a name that would put them outside of the authority's folder."""
    place = folder / quote(site)
    if folder.resolve() not in place.resolve().parents:
        raise InputError(f"{site!r}: can't be a site's name: its files would not be in {folder}")
    return place


def _name(text: str) -> "x509.Name":
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])


def _alternative_names(site: str, hosts: Sequence[str], ips: Sequence[str]) -> list["x509.GeneralName"]:
    from cryptography import x509

    try:
        addresses = [x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips]
        names = [x509.DNSName(host) for host in hosts]
    except ValueError as error:
        raise InputError(f"site {site!r}: {error}") from None
    return [x509.UniformResourceIdentifier(SITE_URI + quote(site)), *addresses, *names]


def _sign(
    authority_key: "EllipticCurvePrivateKey",
    authority: "x509.Certificate | None",
    name: "x509.Name",
    key: "EllipticCurvePrivateKey",
    names: Sequence["x509.GeneralName"],
    days: int,
) -> "x509.Certificate":
    """A certificate for `key`, signed by `authority`; by itself, and good for signing, when that is None."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(authority.subject if authority else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _CLOCKS_DIFFER)
        .not_valid_after(min(end, authority.not_valid_after_utc) if authority else end)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None if authority else 0), critical=True)
        .add_extension(_key_usage(signs=authority is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _key_usage(*, signs: bool) -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _load(folder: Path) -> tuple["EllipticCurvePrivateKey", "x509.Certificate"]:
    """The authority in `folder`; InputError when there is none that can be read."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key((folder / AUTHORITY_KEY_FILE).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY_FILE).read_bytes())
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: no authority: {reason}; make one with `farpipe certs init {folder}`") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{folder / AUTHORITY_KEY_FILE}: is not a key that `farpipe certs init` makes")
    return key, certificate


def _write_key(path: Path, key: "EllipticCurvePrivateKey") -> None:
    """Write a private key that only its owner can read."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    write_text(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(), private=True)


def _write_certificate(path: Path, certificate: "x509.Certificate") -> None:
    from cryptography.hazmat.primitives.serialization import Encoding

    write_text(path, certificate.public_bytes(Encoding.PEM).decode())
