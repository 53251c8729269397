"""The client port's certificate, and its renewal while we run.

Whoever issues certificates for weeks (cert-manager, ACME) writes new files in place of the old ones and tells nobody.
May import: the standard library, router.settings.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from router.settings import ServeSettings, SettingsError

log = logging.getLogger("warmroute.tls")

LOOK_S = 10.0


def server_tls(settings: ServeSettings) -> ssl.SSLContext | None:
    """The client port's TLS. Raises SettingsError with the cure."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise SettingsError("--tls-cert and --tls-key are given together or not at all")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as exc:
        raise SettingsError(f"--tls-cert {settings.tls_cert} with --tls-key {settings.tls_key}: {exc}") from exc
    return context


async def renewed(context: ssl.SSLContext, settings: ServeSettings, *, look_s: float = LOOK_S) -> None:
    """For ever: new connections get what is in the files now. A pair that does not fit is passed over and told once."""
    taken = refused = await asyncio.to_thread(_contents, settings)
    while True:
        await asyncio.sleep(look_s)
        found = await asyncio.to_thread(_contents, settings)
        if found is None or found in (taken, refused):
            continue
        try:
            await asyncio.to_thread(_load, context, settings)
        except (OSError, ssl.SSLError) as exc:  # one of the two is not written yet, or never will be
            refused = found
            log.warning("the new certificate cannot be used; the old one is kept: %s", type(exc).__name__)
            continue
        taken = found
        log.info("certificate renewed")


def _contents(settings: ServeSettings) -> tuple[bytes, bytes] | None:
    """What both files hold; None while one cannot be read."""
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    try:
        return settings.tls_cert.read_bytes(), settings.tls_key.read_bytes()
    except OSError:
        return None


def _load(context: ssl.SSLContext, settings: ServeSettings) -> None:
    """Raises OSError, ssl.SSLError. Tried on another context first: a pair that does not fit would leave half of it."""
    assert settings.tls_cert is not None
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
