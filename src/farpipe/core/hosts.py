"""Addresses that only this machine reaches."""

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """True for an address, or the name, of this machine that no other reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keeps_secrets(url: str) -> bool:
    """True for a URL to which a token can be sent: HTTPS, or HTTP to this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
