"""Untrusted files: read up to a limit, and checked before they are used."""
