"""Certificates and mutual TLS between sites."""
